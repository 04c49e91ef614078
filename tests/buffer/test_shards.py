"""A buffer in shards: what each reads and holds, and a run of two that ends, restarts, is audited
and replayed as a run of one.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.buffer.process import step
from streamrl.buffer.state import BufferState
from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.run.orchestrator.resuming import refusals
from streamrl.stream.log import topics
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import acls
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.partitioner import partition_of
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.processor import processor
from streamrl.stream.processor.definition import Processor
from streamrl.stream.records import Fate, Metric, ScoredGroup
from streamrl.system.errors import ConfigError
from tests.support.build import rollout, rollout_event, version_event
from tests.support.data_path import RUN, announce, wait_for_batches
from tests.support.waiting import patience, until

PARTITIONS = 4


def sharded(shards: int = 2, partitions: int = PARTITIONS) -> RunFile:
    raw = RUN.model_dump(include={"run", "envs", "buffer", "batcher", "model"}, exclude_unset=True)
    raw["buffer"]["shards"] = shards
    return parse({**raw, "topics": {"partitions": partitions}})


def log_for(run: RunFile) -> MemoryLog:
    return MemoryLog(
        {topic.name.removeprefix(f"{run.run}."): topic.partitions for topic in topics.plan(run)}
    )


def send_groups(log: MemoryLog, env: str, numbers: range, version: int) -> None:
    """Groups of two, each in the partition that a Kafka client chooses for it."""
    writer = log.producer()
    for number in numbers:
        group = f"{env}-{number}"
        for i in range(2):
            record = rollout(env, group, i, version, reward=(number * 7 + i * 3) % 5 / 4)
            message = to_message(Output(topology.rollouts(env), group, record))
            writer.send(message._replace(partition=partition_of(group, PARTITIONS)))
    writer.flush()
    writer.close()


class Life:
    """The run's shards and its batcher at work, each in a thread that can be stopped alone."""

    def __init__(self, log: MemoryLog, run: RunFile) -> None:
        self.log = log
        self.stops = dict[str, threading.Event]()
        self.threads = dict[str, threading.Thread]()
        for part in (*buffer.shards(run), batcher.make_processor(run)):
            self.start(part)

    def start(self, part: Processor[Any, Any]) -> None:
        self.stops[part.name] = threading.Event()
        self.threads[part.name] = threading.Thread(
            target=processor.run_processor, args=(self.log, part, self.stops[part.name])
        )
        self.threads[part.name].start()

    def stop(self, name: str) -> None:
        self.stops[name].set()
        self.threads[name].join(patience(20))
        assert not self.threads[name].is_alive()


def closed_groups(log: MemoryLog, run: RunFile) -> Counter[bytes | None]:
    """How often each group stands in the log."""
    return Counter(
        message.key
        for env in run.envs
        for partition in range(PARTITIONS)
        for message in read(log, topology.groups(env), partition, 0)
    )


def test_one_shard_is_the_buffer_that_runs_had_before():
    (only,) = buffer.shards(sharded(1))
    assert only.name == "buffer" and only.config == buffer.make_processor(sharded(1)).config
    assert [part.options for part in topology.BUFFER.parts(sharded(1))] == [()]


def test_shards_are_parts_with_names_journals_and_access_of_their_own():
    run = sharded()
    assert [(part.name, part.options) for part in topology.BUFFER.parts(run)] == [
        ("buffer-0", ("--index", "0")),
        ("buffer-1", ("--index", "1")),
    ]
    names = {topic.name for topic in topics.plan(run)}
    assert {"small.journal.buffer-0", "small.journal.buffer-1"} <= names
    assert "small.journal.buffer" not in names
    rules = "\n".join(map(str, acls.rules(run)["buffer"]))
    assert "READ,WRITE topic small.journal.buffer-1" in rules
    assert "transactional-id small.buffer-0" in rules and "group small.buffer-1" in rules
    assert list(processors_of(run)) == ["buffer-0", "buffer-1", "batcher"]


def test_every_partition_is_read_by_one_shard():
    run = sharded(3)
    log = log_for(run)
    readers = Counter(where for shard in buffer.shards(run) for where in shard.partitions(log))
    for env in run.envs:
        assert [readers[topology.rollouts(env), p] for p in range(PARTITIONS)] == [1] * PARTITIONS
    assert readers["policy-versions", 0] == 3


def test_the_window_is_divided():
    whole = buffer.make_processor(sharded(1)).config
    part = buffer.make_processor(sharded(2)).config
    assert part.max_window_tokens == whole.max_window_tokens // 2


def test_a_shard_that_the_run_does_not_have():
    with pytest.raises(ConfigError, match="--index 2: buffer.shards is 2, so the last shard is 1"):
        buffer.make_processor(sharded(), 2)
    with pytest.raises(ConfigError, match="buffer.shards 5 is larger than topics.partitions 4"):
        sharded(5)
    with pytest.raises(ConfigError, match="does not hold a group"):
        parse({**sharded().model_dump(), "buffer": {"shards": 4, "max_window_tokens": 100}})


def test_a_run_that_goes_on_keeps_its_shards():
    assert any(said.startswith("buffer.shards cannot") for said in refusals(sharded(), sharded(3)))
    assert not list(refusals(sharded(), sharded()))


def test_a_group_in_the_partition_of_another_shard_is_refused_and_closes():
    """Its producer waits for its end, and the shard to which its key belongs never sees it."""
    config = buffer.make_processor(sharded(), 0).config
    foreign = next(
        f"g{i}" for i in range(99) if partition_of(f"g{i}", PARTITIONS) % config.shards == 1
    )
    state, _ = step(config, BufferState(), [version_event(0)], 0.0)
    records = [
        rollout_event(i, rollout("copy", foreign, i), partition=0) for i in range(config.group_size)
    ]
    state, outputs = step(config, state, records, 0.0)
    ended = [output.record for output in outputs]
    assert [record.fate for record in ended if isinstance(record, Fate)] == ["invalid"] * 2
    assert [record.uids for record in ended if isinstance(record, ScoredGroup)] == [[]]
    assert not any(window.open for window in state.windows.values())


def test_metrics_name_their_shard():
    config = buffer.make_processor(sharded(), 1).config
    own = next(f"g{i}" for i in range(99) if partition_of(f"g{i}", PARTITIONS) == 1)
    state, _ = step(config, BufferState(), [version_event(0)], 0.0)
    state, _ = step(config, state, [rollout_event(0, rollout("copy", own, 0), partition=1)], 0.0)
    _, outputs = step(config, state, [version_event(1)], 0.0)
    (metric,) = [output for output in outputs if isinstance(output.record, Metric)]
    assert metric.key == "buffer-1" and metric.record.source == "buffer-1"


def test_a_run_in_shards_is_audited_and_replayed_and_a_shard_restarts():
    run = sharded()
    log = log_for(run)
    life = Life(log, run)
    try:
        for number in range(4):
            announce(log, number)
            for env in run.envs:
                send_groups(log, env, range(number * 8, number * 8 + 8), number)
            wait_for_batches(log, number + 1)
            if number == 1:
                life.stop("buffer-1")
                life.start(buffer.make_processor(run, 1))
        until(lambda: len(closed_groups(log, run)) == 64)
    finally:
        for name in list(life.threads):
            life.stop(name)
    replayed = {name: replay(log, part)[0] for name, part in processors_of(run).items()}
    assert not any(result.difference for result in replayed.values())
    counts = [replayed[name].identical["groups"] for name in ("buffer-0", "buffer-1")]
    assert min(counts) > 0 and sum(counts) == 64
    assert replayed["batcher"].identical["batches"] >= 4
    assert set(closed_groups(log, run).values()) == {1}
    account = audit(log, run)
    assert account.balanced and account.published == 128 and not account.total("lost")
