"""A run that was recorded with this tree and exported: it is read, audited, replayed and restored.

`tests/golden/run` has two envs, six versions and an end of every kind, and its parts were started
twice. Whoever changes a record, a journal or a decision of buffer or batcher sees it here, and
records the run again: `python -m tests.extensions.recordings.test_golden_run --record`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from streamrl.config import topology
from streamrl.extensions.recordings.archive import export
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.run.monitoring.run_history import collect
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.parquet import FileLog
from streamrl.stream.log.protocol import Log, Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.records import Rollout
from tests.support.build import rollout
from tests.support.data_path import (
    RUN,
    TOPICS,
    announce,
    publish,
    running,
    send_groups,
    wait_for_batches,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "run"
VERSIONS = 6
FATES = {"duplicate": 1, "failed": 1, "filtered": 1, "invalid": 1}


def record(directory: Path) -> None:
    """Record the run, and export it to this directory."""
    log = MemoryLog(TOPICS)
    for first in (0, VERSIONS // 2):
        with running(log):
            for version in range(first, first + VERSIONS // 2):
                announce(log, version)
                if version == VERSIONS - 1:
                    send(log, *odd_rollouts(version))
                for env in RUN.envs:
                    send_groups(log, env, range(version * 5, version * 5 + 5), version)
                wait_for_batches(log, version + 1)
    shutil.rmtree(directory, ignore_errors=True)
    export(log, RUN, directory)


def odd_rollouts(version: int) -> list[Rollout]:
    """Those that are not trained on, after the groups of all versions but the last."""
    return [
        rollout("copy", "copy-0", 0, 0),  # a duplicate
        rollout("copy", "copy-0", 7, version),  # late for its group
        rollout("copy", "old", 0, 0),
        rollout("copy", "old", 1, 0),
        rollout("add", "failing", 0, version, failure="the server has gone"),
        rollout("add", "huge", 0, version, reward=1e19),
        rollout("add", "alone", 0, version),
    ]


def send(log: Log, *rollouts: Rollout) -> None:
    publish(log, *(Output(topology.rollouts(r.environment), r.group_id, r) for r in rollouts))


@pytest.fixture(scope="module")
def golden() -> FileLog:
    return FileLog(GOLDEN)


def messages(log: Log) -> list[Message]:
    return [
        message
        for topic, count in sorted(log.topics().items())
        for partition in range(count)
        for message in read(log, topic, partition)
    ]


def test_every_record_is_written_as_it_was_read(golden: FileLog):
    schemas = dict[str, None]()
    for message in messages(golden):
        if topology.kind_of(message.topic) != topology.DEAD_LETTERS:
            schema = dict(message.headers)["schema"]
            schemas[schema.decode()] = None
            assert encode(decode(schema, message.value or b"")) == message.value, message
    wanted = (
        "batch",
        "demand",
        "fate",
        "journal-entry",
        "metric",
        "policy-version",
        "rollout",
        "scored-group",
        "snapshot",
    )
    assert sorted(schemas) == [f"{name}/1" for name in wanted]


def test_each_rollout_has_one_fate(golden: FileLog):
    account = audit(golden, RUN)
    assert account.balanced and account.problems == []
    assert {kind: account.total(kind) for kind in FATES} == FATES
    assert account.total("batched") >= 8 * VERSIONS
    assert account.total("expired") >= 2 and account.total("in flight") > 0


def test_its_steps_are_counted(golden: FileLog):
    assert collect(RUN, golden).newest == VERSIONS - 1


@pytest.mark.parametrize("name", ["buffer", "batcher"])
def test_a_replay_gives_the_recorded_bytes_and_a_restore_the_same_state(golden: FileLog, name: str):
    part = processors_of(RUN)[name]
    result, whole = replay(golden, part)
    assert result.difference == "" and result.begins_at == 0
    assert result.identical["groups" if name == "buffer" else "batches"] >= VERSIONS
    restored, _ = restore(golden, part)
    assert restored.snapshot_offset > 0
    assert serialize_state(restored.state) == serialize_state(whole.state)


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        raise SystemExit("python -m tests.extensions.recordings.test_golden_run --record")
    record(GOLDEN)
