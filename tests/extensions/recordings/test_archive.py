"""A run to files and back: nothing of it is lost or moved, and it replays and balances wherever it
lies.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings import archive
from streamrl.extensions.recordings.archive import (
    export,
    exported_run_file,
    import_run,
    run_file_for_import,
)
from streamrl.extensions.recordings.audit import Audit, audit
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log import import_plan, topics
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.offset_import import OffsetPreservingWriter
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.parquet import ExportManifest, FileLog, write_manifest, write_partition
from streamrl.stream.log.protocol import Log, Message, Output, beginning_offset, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import RunConfig
from streamrl.system.errors import BrokerError, ConfigError, ExportError
from tests.support.data_path import RUN, TOPICS, parts, play, publish
from tests.support.waiting import patience


@pytest.fixture(scope="module")
def recording() -> MemoryLog:
    log = MemoryLog(TOPICS)
    play(log)
    return log


def everything(log: Log) -> dict[tuple[str, int], list[Message]]:
    """All that lies in a log; times as a broker keeps them, in whole milliseconds."""
    partitions = [(topic, p) for topic, count in sorted(log.topics().items()) for p in range(count)]
    return {
        (t, p): [
            m._replace(timestamp_s=round(m.timestamp_s * 1000) / 1000) for m in read(log, t, p)
        ]
        for t, p in partitions
    }


def bounds(log: Log) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        (topic, p): (beginning_offset(log, topic, p), end_offset(log, topic, p))
        for topic, count in log.topics().items()
        for p in range(count)
    }


def account(log: Log, run: RunFile = RUN) -> Audit:
    return audit(log, run)


def replays(log: Log, run: RunFile = RUN) -> tuple[int, int]:
    """Groups and batches that come out the same, of a log in which nothing differs."""
    results = [replay(log, part)[0] for part in parts(run)]
    assert [result.difference for result in results] == ["", ""]
    return results[0].identical["groups"], results[1].identical["batches"]


def test_files_hold_all_of_a_log(recording: MemoryLog, tmp_path: Path):
    files = export(recording, RUN, tmp_path / "x")
    assert everything(files) == everything(recording) and bounds(files) == bounds(recording)
    assert files.manifest.run == "small" and exported_run_file(files) == RUN


def test_topics_that_a_doctor_tries_are_not_of_the_run(tmp_path: Path):
    log = MemoryLog({"batches": 1, "doctor-0a1b2c3d": 1, "doctor-0a1b2c3d.compacted": 1})
    assert set(export(log, RUN, tmp_path / "x").topics()) == {"batches"}


def test_replay_and_audit_need_the_files_only(recording: MemoryLog, tmp_path: Path):
    files = export(recording, RUN, tmp_path / "x")
    assert replays(files) == replays(recording) and replays(files)[1] >= 4
    assert account(files) == account(recording) and account(files).balanced


def test_a_run_that_differs_is_found_in_files_too(recording: MemoryLog, tmp_path: Path):
    """One rollout with another reward, in a file whose hash is right: only replaying it tells."""
    files = export(recording, RUN, tmp_path / "x")
    messages = list(read(files, "rollouts.copy", 0, 0))
    other = [
        m._replace(value=(m.value or b"").replace(b"\xcb\x3f\xe8", b"\xcb\x3f\xe9"))
        for m in messages
    ]
    assert other != messages
    partition = write_partition(
        files.directory, ("rollouts.copy", 0), 0, end_offset(files, "rollouts.copy", 0), other
    )
    write_manifest(
        files.directory,
        ExportManifest(
            "small",
            files.manifest.run_file,
            {**files.manifest.topics, "rollouts.copy": [partition]},
        ),
    )
    assert "advantages[" in replay(FileLog(files.directory), parts()[0])[0].difference


def test_what_lies_in_the_way_is_not_touched(recording: MemoryLog, tmp_path: Path):
    taken = tmp_path / "x"
    taken.mkdir()
    export(recording, RUN, taken)  # an empty directory will do
    before = sorted(tmp_path.rglob("*"))
    for directory in (taken, taken / "manifest.json"):
        with pytest.raises(ExportError, match="not an empty directory"):
            export(recording, RUN, directory)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_that_fails_leaves_nothing(
    recording: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "write_manifest", fail)
    with pytest.raises(OSError, match="No space left"):
        export(recording, RUN, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_journals_are_looked_at_first_and_rollouts_last(recording: MemoryLog):
    order = [topic for topic, _ in archive.ends(recording)]
    assert {topic.partition(".")[0] for topic in order[:2]} == {"journal"} and {
        t.partition(".")[0] for t in order[-2:]
    } == {"rollouts"}


def test_the_run_file_is_the_one_recorded_and_belongs_to_no_machine(tmp_path: Path):
    log = MemoryLog({"config": 1})
    given = RUN.model_copy(
        update={
            "kafka": {"bootstrap.servers": "there:1", "sasl.password": "hunter2"},
            "runs_dir": "/elsewhere",
        }
    )
    assert archive.recorded_run_file(log, given) is given
    recorded = RUN.model_copy(
        update={"learner": RUN.learner.model_copy(update={"warmup_steps": 7}), "kafka": given.kafka}
    )
    publish(
        log, Output("config", "small", RunConfig(run="small", text=recorded.to_json(), time_s=0.0))
    )
    files = export(log, given, tmp_path / "x")
    assert exported_run_file(files).learner.warmup_steps == 7
    text = (files.directory / "manifest.json").read_text()
    assert "hunter2" not in text and "there:1" not in text and "elsewhere" not in text
    publish(
        log,
        Output("config", "small", RunConfig(run="small", text='{"what": "is this"}', time_s=0.0)),
    )
    assert archive.recorded_run_file(log, given) is given


def test_a_run_made_of_an_export_keeps_what_is_old(recording: MemoryLog, tmp_path: Path):
    run = run_file_for_import(export(recording, RUN, tmp_path / "x"), "again")
    assert run.run == "again"
    for topic in topics.plan(run):
        assert (
            topic.config.get("retention.ms") == "-1" or topic.config["cleanup.policy"] == "compact"
        )


# ---- on a broker ---------------------------------------------------------------------------------


def on_broker(broker: str, name: str, partitions: int = 1) -> tuple[RunFile, KafkaLog]:
    """A run of that name with its topics."""
    run = RUN.model_copy(
        update={"run": name, "topics": RUN.topics.model_copy(update={"partitions": partitions})}
    )
    topic_changes.apply(run, {"bootstrap.servers": broker})
    return run, KafkaLog({"bootstrap.servers": broker}, name)


def settled(log: KafkaLog) -> None:
    """Markers may come after a transaction has ended: wait until none does."""
    before = bounds(log)
    while time.sleep(patience(0.3)) or bounds(log) != before:
        before = bounds(log)


def imported(files: FileLog, broker: str, name: str) -> tuple[RunFile, KafkaLog]:
    run = run_file_for_import(files, name)
    kafka = {"bootstrap.servers": broker}
    import_run(files, run, kafka)
    return run, KafkaLog(kafka, name)


def test_there_and_back_on_a_broker(broker: str, run_name: str, tmp_path: Path):
    run, log = on_broker(broker, run_name)
    play(log, run=run)
    # a tombstone, with a header of its own
    log.writer("a").commit([Message("policy-versions", b"other", None, (("x", b"\x00"),))])
    settled(log)
    first = export(log, run, tmp_path / "first")
    assert everything(first) == everything(log) and bounds(first) == bounds(log)
    assert (replays(first, run), account(first, run)) == (replays(log, run), account(log, run))

    again, copy = imported(first, broker, f"{run_name}-again")
    assert everything(copy) == everything(log) and bounds(copy) == bounds(log)
    assert replays(copy, again) == replays(log, run)
    second = export(copy, again, tmp_path / "second")
    assert everything(second) == everything(first) and bounds(second) == bounds(first)


def test_aborted_transactions_retention_and_several_partitions(
    broker: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Holes of every size: 1 and 2 behind records, larger ones, and a beginning that retention has
    deleted.
    """
    monkeypatch.setattr(import_plan, "MAX_OP_MESSAGES", 3)
    run, log = on_broker(broker, run_name, partitions=2)

    def record(topic: str, value: int, partition: int = 0) -> Message:
        return Message(topic, b"k%d" % value, b"%d" % value, partition=partition, timestamp_s=value)

    plain = log.producer()
    writer = log.writer("a")
    rewriter = OffsetPreservingWriter(log)
    for i in range(8):
        plain.send(record("rollouts.copy", i, 1))
    plain.flush()
    for i in range(3):
        writer.commit([record("rollouts.copy", i, 1), record("fates", i), record("demand", i)])
    plain.send(record("batches", 0))
    plain.flush()
    settled(log)
    for topic, gap in (("fates", 4), ("batches", 2)):  # aborted transactions of 3 records and of 1
        rewriter.write([import_plan.WriteOp((topic, 0), [], gap, end_offset(log, topic, 0) + gap)])
        rewriter.wait()
        plain.send(record(topic, 9))
    plain.flush()
    log.delete_before({("rollouts.copy", 1): 3, ("fates", 0): 1})
    settled(log)
    assert [m.offset for m in everything(log)["batches", 0]] == [0, 3] and [
        m.offset for m in everything(log)["fates", 0]
    ] == [2, 4, 10]
    assert bounds(log)["fates", 0] == (1, 11) and bounds(log)["rollouts.copy", 1] == (3, 14)

    files = export(log, run, tmp_path / "x")
    assert everything(files) == everything(log) and bounds(files) == bounds(log)
    _, copy = imported(files, broker, f"{run_name}-again")
    assert everything(copy) == everything(log) and bounds(copy) == bounds(log)


def test_a_name_that_is_taken_and_topics_of_no_kind(broker: str, run_name: str, tmp_path: Path):
    _, log = on_broker(broker, run_name)
    files = export(MemoryLog(TOPICS), RUN, tmp_path / "x")
    with pytest.raises(ConfigError, match=f"topics of a run '{run_name}' already"):
        import_run(files, run_file_for_import(files, run_name), {"bootstrap.servers": broker})
    assert "demand" in log.topics()
    strange = export(MemoryLog({"what.is-this": 1}), RUN, tmp_path / "y")
    with pytest.raises(ConfigError, match="topic what.is-this is of no kind"):
        import_run(
            strange,
            run_file_for_import(strange, f"{run_name}-strange"),
            {"bootstrap.servers": broker},
        )


def test_an_import_that_fails_leaves_nothing(broker: str, run_name: str, tmp_path: Path):
    (tmp_path / "x").mkdir()
    partition = write_partition(
        tmp_path / "x",
        ("fates", 0),
        0,
        2,
        [
            Message(
                topic="fates",
                key=b"k",
                value=b"v",
                headers=(),
                partition=0,
                offset=1,
                timestamp_s=1.0,
            )
        ],
    )
    write_manifest(
        tmp_path / "x", ExportManifest("small", archive.shareable(RUN), {"fates": [partition]})
    )
    files = FileLog(tmp_path / "x")
    with pytest.raises(
        BrokerError, match=r"fates\[0\] begins with a single offset .* from the files instead"
    ):
        import_run(files, run_file_for_import(files, run_name), {"bootstrap.servers": broker})
    assert KafkaLog({"bootstrap.servers": broker}, run_name).topics() == {}
