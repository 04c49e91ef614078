"""One process at a time is a part, and what it has read is where every Kafka tool looks. Processes
as a user starts them, on a real broker.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from confluent_kafka import Producer
from kafka import KafkaAdminClient
from kafka import TopicPartition as Where

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message
from streamrl.stream.log.reading import read
from streamrl.stream.records import ScoredGroup
from streamrl.system.errors import BrokerError, Fenced
from tests.support.data_path import announce, published, send_groups
from tests.support.waiting import patience, until

LIMIT_S = 60.0


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> RunFile:
    """A run whose topics exist."""
    settings = {
        "envs": {"copy": {"fraction": 1.0}},
        "buffer": {"group_size": 2},
        "batcher": {"max_seq_len": 10},
        "model": {"max_seq_len": 10},
    }
    run = run_file.parse(
        {
            "run": run_name,
            "runs_dir": str(tmp_path),
            "kafka": {"bootstrap.servers": broker},
            **settings,
        }
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    topic_changes.apply(run, run.kafka)
    return run


@pytest.fixture
def log(run: RunFile, broker: str) -> KafkaLog:
    return KafkaLog({"bootstrap.servers": broker}, run.run)


class Buffer:
    """`streamrl buffer RUN.yaml`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._output = directory / f"{name}.log"
        with self._output.open("wb") as output:
            command = [sys.executable, "-m", "streamrl.cli", "buffer", str(directory / "run.yaml")]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def said(self) -> str:
        return self._output.read_text()


@pytest.fixture
def start(tmp_path: Path, run: RunFile) -> Iterator[Callable[[], Buffer]]:
    started: list[Buffer] = []

    def start() -> Buffer:
        started.append(Buffer(tmp_path, f"buffer-{len(started)}"))
        until(lambda: "ready after" in started[-1].said(), otherwise=started[-1].said)
        return started[-1]

    yield start
    for buffer in started:
        buffer.process.kill()
        buffer.process.wait()


def groups(log: KafkaLog) -> list[str]:
    return [group.group_id for group in published(log, "groups.copy", ScoredGroup)]


def test_a_second_process_fences_the_first_which_says_so_and_ends_with_a_code_of_its_own(
    log: KafkaLog, start: Callable[[], Buffer]
):
    first = start()
    announce(log, 0)
    send_groups(log, "copy", range(3), 0)
    until(lambda: len(groups(log)) == 3, otherwise=first.said)
    second = start()
    assert first.process.poll() is None, "it learns of the other one when it next writes"
    send_groups(log, "copy", range(3, 6), 0)
    assert first.process.wait(patience(LIMIT_S)) == Fenced.exit_code == 76
    assert (
        first.said().splitlines()[-1]
        == "streamrl: buffer: another process with this identity has taken over; stop one of"
        " the two"
    )
    until(lambda: len(groups(log)) == 6, otherwise=second.said)
    assert sorted(groups(log)) == [f"copy-{number}" for number in range(6)]
    second.process.terminate()
    assert second.process.wait(patience(LIMIT_S)) == 0


def test_another_client_sees_how_far_a_part_has_read_and_how_much_is_left(
    log: KafkaLog, run: RunFile, broker: str, start: Callable[[], Buffer]
):
    """kafka-python asks as `kafka-consumer-groups --describe` does: committed offsets of a group,
    and the ends of its partitions.
    """
    buffer = start()
    announce(log, 0)
    send_groups(log, "copy", range(4), 0)
    until(lambda: len(groups(log)) == 4, otherwise=buffer.said)
    admin = KafkaAdminClient(bootstrap_servers=broker)
    rollouts = Where(f"{run.run}.rollouts.copy", 0)
    versions = Where(f"{run.run}.policy-versions", 0)

    def lags() -> dict[Where, int]:
        committed = admin.list_group_offsets(f"{run.run}.buffer")[f"{run.run}.buffer"]
        ends = admin.list_partition_offsets(dict.fromkeys(committed, -1))  # -1: latest
        return {where: ends[where].offset - there.offset for where, there in committed.items()}

    until(lambda: lags() == {rollouts: 0, versions: 0}, otherwise=lags)
    buffer.process.terminate()
    assert buffer.process.wait(patience(LIMIT_S)) == 0
    send_groups(log, "copy", range(4, 7), 0)
    assert lags() == {rollouts: 6, versions: 0}
    start()
    until(lambda: lags() == {rollouts: 0, versions: 0}, otherwise=lags)
    admin.close()


def test_a_part_does_not_start_on_a_memory_that_is_not_decided(
    log: KafkaLog, run: RunFile, broker: str
):
    """As when a broker has lost the end of a transaction: what it has done may lie behind that, out
    of its sight.
    """
    producer = Producer({"bootstrap.servers": broker, "transactional.id": f"{run.run}.lost"})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(f"{run.run}.journal.buffer", b"not decided")
    producer.flush()
    with pytest.raises(
        BrokerError,
        match=(
            rf"{run.run}.journal.buffer\[0\]@0 is neither committed nor aborted after 0"
            r" s.*find-hanging"
        ),
    ):
        log._wait_until_settled("journal.buffer", limit_s=0.3)
    aborted = threading.Timer(0.5, producer.abort_transaction)
    before = time.monotonic()
    aborted.start()
    log.writer("buffer", "journal.buffer")
    assert time.monotonic() - before > 0.4
    aborted.join()


def test_what_a_dead_part_has_left_open_blocks_readers_until_it_times_out(
    log: KafkaLog, run: RunFile, broker: str
):
    """Its own next life ends that at once; without one the broker does, at
    `transaction.timeout.ms`.
    """
    script = """
import sys, time
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.writer import TRANSACTIONAL
# a minute is not waited for here
TRANSACTIONAL |= {"transaction.timeout.ms": 3_000, "message.timeout.ms": 2_000}
writer = KafkaLog({"bootstrap.servers": sys.argv[1]}, sys.argv[2]).writer("dying")
writer._producer.begin_transaction()
writer._producer.produce(f"{sys.argv[2]}.fates", b"never committed")
writer._producer.flush()
print("open", flush=True)
time.sleep(600)
"""
    dying = subprocess.Popen(
        [sys.executable, "-c", script, broker, run.run],
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    )
    assert dying.stdout is not None
    with dying.stdout:
        dying.stdout.readline()
    dying.kill()
    dying.wait()
    killed = time.monotonic()
    log.writer("living").commit([Message("fates", b"k", b"committed")])
    until(lambda: list(read(log, "fates", 0, 0)))
    # 3 s, and what the broker takes to notice; its own limit is 60
    assert time.monotonic() - killed < 3 + patience(10)
    assert [message.value for message in read(log, "fates", 0, 0)] == [b"committed"]
