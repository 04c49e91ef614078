"""A broker that is there and does not answer, which librdkafka waits for without end: a process says so and leaves. Processes, on a real broker."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.stream import broker
from streamrl.stream.broker import Broker
from tests.kafka import make_topics
from tests.waiting import patience

PATIENCE_S = patience(120.0)
LEAVES_S = patience(30.0)  # librdkafka lets a client go after 45 s
PART = """
import sys

from streamrl.errors import BrokerUnreachable
from streamrl.stream.kafka import KafkaLog

log = KafkaLog({"bootstrap.servers": sys.argv[1]}, "silent")
new, old, asking = (log.writer(name) for name in ("new", "old", "asking"))  # nobody has told the first who coordinates its group
old.mark({("in", 0): 0})
asking.mark({("in", 0): 0})
print("begun", flush=True)
sys.stdin.readline()
new.mark({("in", 0): 1}, wait=False)
old.mark({("in", 0): 1}, wait=False)
try:
    asking.mark({("in", 0): 1})
except BrokerUnreachable as error:
    print(error, flush=True)
del asking
new.close()
old.close()
"""


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Broker]:
    started = broker.start(tmp_path / "kafka")
    try:
        yield started
    finally:
        started.process.resume()
        started.stop()


def test_a_process_that_has_marked_its_positions_says_so_and_leaves(kafka: Broker):
    make_topics(kafka.address, {"silent.in": 1})
    with subprocess.Popen([sys.executable, "-c", PART, kafka.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as part:
        assert part.stdin is not None and part.stdout is not None
        impatience = threading.Timer(PATIENCE_S, part.kill)
        impatience.start()
        try:
            assert part.stdout.readline() == "begun\n"
            kafka.process.suspend()
            print(file=part.stdin, flush=True)
            assert part.stdout.readline().startswith(f"no Kafka broker answers at {kafka.address}")
            assert part.wait(LEAVES_S) == 0
        finally:
            impatience.cancel()
            part.kill()
