from tests.live import live as live
