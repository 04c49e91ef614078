from tests.support.live import servers as servers
