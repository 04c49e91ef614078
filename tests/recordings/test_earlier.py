"""A run that an earlier streamrl (c706398) recorded and exported: read, audited, replayed, exported
and continued by the code of today.

`tests/golden/run-v1`: two envs, six versions, a real broker; buffer and batcher were started twice
and wrote a snapshot every 25 events. In it is an end of every kind. It is never made anew: what it
holds is what the code of that day wrote.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from streamrl.config import topology
from streamrl.log.codec import decode, encode
from streamrl.log.kafka import KafkaLog
from streamrl.log.parquet import FileLog
from streamrl.log.protocol import Log, Message
from streamrl.log.reading import read
from streamrl.monitoring.run_history import collect
from streamrl.monitoring.status import read_view
from streamrl.processor import restore as restoring
from streamrl.processor.definition import Processor
from streamrl.processor.journal import entries
from streamrl.processor.snapshots import held_events
from streamrl.recordings.archive import (
    export,
    exported_run_file,
    import_run,
    run_file_for_import,
)
from streamrl.recordings.audit import KINDS, audit
from streamrl.recordings.processors import processors_of
from streamrl.recordings.replay import replay
from streamrl.records import Snapshot
from tests.support.data_path import announce, running, send_groups, wait_for_batches

GROUPS = 61
BATCHES = 7
VERSIONS = 6
FATES = {
    "batched": 112,
    "expired": 4,
    "filtered": 1,
    "duplicate": 1,
    "failed": 1,
    "invalid": 1,
    "in flight": 4,
}


@pytest.fixture(scope="module")
def earlier() -> FileLog:
    return FileLog(Path(__file__).parents[1] / "golden" / "run-v1")


def messages(log: Log) -> list[Message]:
    return [
        m
        for topic, count in sorted(log.topics().items())
        for p in range(count)
        for m in read(log, topic, p)
    ]


def replays(log: Log, parts: dict[str, Processor]) -> tuple[int, int]:
    results = {name: replay(log, part)[0] for name, part in parts.items()}
    assert [result.difference for result in results.values()] == ["", ""]
    return results["buffer"].identical["groups"], results["batcher"].identical["batches"]


def test_every_record_is_read_and_would_be_written_the_same(earlier: FileLog):
    schemas = Counter[str]()
    for message in messages(earlier):
        if not message.topic.startswith("dead-letters") and message.value != b"\xc1rubbish":
            schema = dict(message.headers)["schema"].decode()
            assert encode(decode(schema.encode(), message.value or b"")) == message.value, (
                f"{message.topic}@{message.offset}"
            )
            schemas[schema] += 1
    wanted = (
        "rollout",
        "scored-group",
        "batch",
        "policy-version",
        "demand",
        "fate",
        "journal-entry",
        "snapshot",
        "metric",
        "run-config",
    )
    assert schemas.keys() == {f"{name}/1" for name in wanted}


def test_it_is_audited(earlier: FileLog):
    run = exported_run_file(earlier)
    account = audit(earlier, run)
    assert account.balanced and account.problems == []
    assert {name: account.total(name) for name in (*KINDS, "in flight")} == FATES


def test_its_state_and_its_report_are_read(earlier: FileLog):
    """A topic that has come since is missing here, and nobody who reads it may end of that."""
    run = exported_run_file(earlier)
    assert read_view(run, earlier).version == VERSIONS - 1
    assert collect(run, earlier).newest == VERSIONS - 1


def test_it_is_replayed(earlier: FileLog):
    assert replays(earlier, processors_of(exported_run_file(earlier))) == (GROUPS, BATCHES)


@pytest.mark.parametrize("name", ["buffer", "batcher"])
def test_snapshots_are_read_and_hold_what_the_whole_fold_holds(earlier: FileLog, name: str):
    part = processors_of(exported_run_file(earlier))[name]
    written = [
        record
        for _, record in entries(earlier, topology.journal(name))
        if isinstance(record, Snapshot)
    ]
    fold, taken = restoring.restore(earlier, part)
    assert len(written) >= 2 and fold.snapshot_offset > 0
    # not from the beginning
    assert taken < sum(1 for m in messages(earlier) if m.topic in part.inputs)
    whole = replay(earlier, part)[1]
    assert (fold.sequence, fold.offsets) == (whole.sequence, whole.offsets)
    assert held(fold.state) == held(whole.state) and bool(held(fold.state)) == (name == "batcher")


def held(state: object) -> list[tuple[str, int, int]]:
    """Where the records lie that a part holds."""
    return sorted((event.topic, event.partition, event.offset) for event in held_events(state))


def test_it_is_exported(earlier: FileLog, tmp_path: Path):
    again = export(earlier, exported_run_file(earlier), tmp_path / "again")
    assert messages(again) == messages(earlier)


def test_it_goes_on_on_a_broker(earlier: FileLog, broker: str, run_name: str):
    run = run_file_for_import(earlier, run_name)
    kafka = {"bootstrap.servers": broker}
    import_run(earlier, run, kafka)
    log = KafkaLog(kafka, run_name)
    with running(log, run):
        for version in range(VERSIONS, VERSIONS + 3):
            announce(log, version)
            for env in run.envs:
                send_groups(log, env, range(version * 5, version * 5 + 5), version)
        wait_for_batches(log, BATCHES + 2, 60)
    assert replays(log, processors_of(run))[1] >= BATCHES + 2
    assert audit(log, run).balanced
