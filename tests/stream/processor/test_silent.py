"""A broker that is there and does not answer, which librdkafka waits for without end: a part goes
on, and can leave. Processes, on a real broker.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.stream.local_kafka import broker
from streamrl.stream.local_kafka.broker import Broker
from streamrl.stream.log.kafka.committer import MAX_UNANSWERED
from tests.support.kafka import make_topics
from tests.support.waiting import patience, until

PATIENCE_S = patience(120.0)
LEAVES_S = patience(30.0)  # librdkafka lets a client go after 45 s
PART = """
import logging
import sys

from streamrl.system.errors import BrokerUnreachable
from streamrl.stream.log.kafka.log import KafkaLog

logging.basicConfig(stream=sys.stdout, format="%(message)s")


def opened(name):
    while True:  # a new broker may take its time
        try:
            return log.writer(name)
        except BrokerUnreachable:
            pass


log = KafkaLog({"bootstrap.servers": sys.argv[1]}, "silent")
new = opened("new")  # nobody has told it who coordinates its group
old = opened("old")
asking = opened("asking")
for writer in (old, asking):
    while not writer.commit_offsets({("in", 0): 0}):
        pass
print("begun", flush=True)
sys.stdin.readline()
for offset in range(1, 100):
    new.commit_offsets({("in", 0): offset}, wait=False)
    old.commit_offsets({("in", 0): offset}, wait=False)
print(asking.commit_offsets({("in", 0): 1}), old._committer.unanswered, flush=True)
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


def stands_still(pid: int) -> bool:
    """Whether all its threads do. On a busy machine some go on for a moment after the signal."""
    states = [
        file.read_text().rpartition(") ")[2][0] for file in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) <= {"T"}


def test_a_process_whose_marks_nobody_answers_says_so_goes_on_and_leaves_when_it_ends(
    kafka: Broker,
):
    make_topics(kafka.address, {"silent.in": 1})
    said = list[str]()
    with subprocess.Popen(
        [sys.executable, "-c", PART, kafka.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as part:
        assert part.stdin is not None and part.stdout is not None
        impatience = threading.Timer(PATIENCE_S, part.kill)
        impatience.start()
        try:
            for line in part.stdout:
                said.append(line)
                if line == "begun\n":
                    break
            kafka.process.suspend()
            until(lambda: stands_still(kafka.process.pid))
            print(file=part.stdin, flush=True)
            said += part.stdout
            assert part.wait(LEAVES_S) == 0, said
        finally:
            impatience.cancel()
            part.kill()
    warning, answer = said[-2:]
    assert warning.startswith(
        "asking: its offsets are not shown to lag tools for now: no Kafka broker answers at"
        f" {kafka.address}"
    ), said
    assert answer == f"False {MAX_UNANSWERED}\n", said
