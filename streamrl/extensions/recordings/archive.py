"""Exports a run to files and imports it again: every topic with its keys, headers, timestamps,
tombstones and offsets.

Offsets are part of a run. A journal states by offsets what a part has read, and a fate which
rollout it belongs to. So an import gives every record its old offset (`stream/log/import_plan.py`),
and journals can be replayed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from streamrl.config import topology
from streamrl.config.choices import NAME
from streamrl.config.run_file import RUN_FILE, RunFile, load, parse_resolved
from streamrl.extensions.recordings.foreign_settings import harmless_settings
from streamrl.extensions.recordings.output_directory import new_directory
from streamrl.extensions.recordings.progress import OnProgress, no_progress
from streamrl.stream.log.import_plan import WriteOp, plan_writes
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.doctor import DOCTOR_PREFIX
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.offset_import import OffsetPreservingWriter
from streamrl.stream.log.parquet import (
    MAX_GAP_OFFSETS,
    ExportedPartition,
    ExportManifest,
    FileLog,
    write_manifest,
    write_partition,
)
from streamrl.stream.log.protocol import Log, Message, TopicPartition, beginning_offset, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import RunConfig
from streamrl.system.errors import BrokerError, ConfigError

AT_ONCE = 16  # the partitions that are written side by side, in one transaction
EVERY = 1_000  # records between two reports of progress


# ---- to files ------------------------------------------------------------------------------------


def export(log: Log, run: RunFile, directory: Path, progress: OnProgress = no_progress) -> FileLog:
    """Write all topics of a run to `directory`, which appears only when it is complete.

    Raises ExportError if `directory` exists and is not an empty directory.
    """
    with new_directory(directory) as temporary:
        _write_topics(log, run, temporary, progress)
    return FileLog(directory)


def _write_topics(log: Log, run: RunFile, directory: Path, progress: OnProgress) -> None:
    bounds = {where: (beginning_offset(log, *where), end) for where, end in ends(log).items()}
    total = sum(end - start for start, end in bounds.values())
    before = 0
    written: dict[str, list[ExportedPartition]] = {topic: [] for topic in sorted(_topics(log))}
    for where, (start, end) in sorted(bounds.items()):
        messages = read(log, *where, start, end, whole=False)
        reported = _with_progress(messages, before - start, total, progress)
        written[where[0]].append(write_partition(directory, where, start, end, reported))
        before += end - start
    run_file = shareable(recorded_run_file(log, run))
    write_manifest(directory, ExportManifest(run.run, run_file, written))


def ends(log: Log) -> dict[TopicPartition, int]:
    """The end offset of each partition.

    The run may continue meanwhile. So journals are asked first, then their outputs, then rollouts:
    whatever an exported record refers to is older than it, and is exported too.
    """

    def order(topic: str) -> tuple[bool, bool, str]:
        kind = topology.kind_of(topic)
        return kind == topology.ROLLOUTS, kind != topology.JOURNAL, topic

    counts = _topics(log)
    return {
        (topic, partition): end_offset(log, topic, partition)
        for topic in sorted(counts, key=order)
        for partition in range(counts[topic])
    }


def _topics(log: Log) -> dict[str, int]:
    """Topics of the run, with their number of partitions. Those that `streamrl doctor` is just
    trying are none: they are deleted in a moment.
    """
    return {
        topic: count for topic, count in log.topics().items() if not topic.startswith(DOCTOR_PREFIX)
    }


def _with_progress(
    messages: Iterator[Message], before: int, total: int, progress: OnProgress
) -> Iterator[Message]:
    for index, message in enumerate(messages):
        if index % EVERY == 0:
            progress(before + message.offset, total)
        yield message


def recorded_run_file(log: Log, run: RunFile) -> RunFile:
    """The run file that the run has recorded last, or `run` if it has none that can be read."""
    if topology.CONFIG not in log.topics():
        return run
    last = last_record(log, topology.CONFIG, RunConfig)
    if last is None:
        return run
    try:
        # The settings of the cluster are recorded without their secrets, so they are of no use.
        return parse_resolved({**msgspec.json.decode(last.text), "kafka": {}}, "config")
    except (ConfigError, msgspec.DecodeError):
        return run


def shareable(run: RunFile) -> dict[str, object]:
    """The run file without the settings that belong to one machine or cluster."""
    return run.model_copy(update={"kafka": {}, "runs_dir": "runs"}).model_dump(mode="json")


# ---- from files ----------------------------------------------------------------------------------


def exported_run_file(files: FileLog) -> RunFile:
    """The run file of an export.

    Anybody may have written the export, so only settings that act on nothing here are taken
    (`foreign_settings.py`). Code is, if a run of the same name in runs/ imports it already.
    """
    own = Path("runs") / files.manifest.run / RUN_FILE
    trusted = frozenset[str]()
    if NAME.fullmatch(files.manifest.run) and own.is_file():
        trusted = load(own).imported
    settings = harmless_settings(files.manifest.run_file, trusted)
    return parse_resolved({**settings, "imports": sorted(trusted)}, str(files.directory))


def run_file_for_import(files: FileLog, name: str) -> RunFile:
    """The run file for an import of an export as run `name`. Retention deletes nothing of it."""
    run = exported_run_file(files)
    kept = {**run.topics.model_dump(), "config": {**run.topics.config, "retention.ms": "-1"}}
    return parse_resolved({**run.model_dump(), "run": name, "topics": kept}, str(files.directory))


def import_run(
    files: FileLog, run: RunFile, kafka: dict[str, object], progress: OnProgress = no_progress
) -> None:
    """Create the topics of `run` and write the exported records, each at its old offset.

    If that fails, the topics are deleted again. Raises ConfigError if the cluster has topics of the
    run already, and BrokerError if a record cannot get its old offset.
    """
    topic_changes.create(run, kafka, files.topics())
    try:
        log = KafkaLog(kafka, run.run)
        write_records(files, log, progress)
        check_offsets(files, log)
    except BaseException:
        topic_changes.delete(run, kafka)
        raise


def write_records(files: FileLog, log: KafkaLog, progress: OnProgress) -> None:
    """Write the records of all partitions, up to `AT_ONCE` partitions side by side."""
    partitions = list(_partitions(files))
    total = sum(end_offset(files, *where) for where in partitions)
    waiting = iter(partitions)
    done = 0
    active: list[Iterator[WriteOp]] = []
    writer = OffsetPreservingWriter(log)
    while True:
        active += (plan(files, where) for where in islice(waiting, AT_ONCE - len(active)))
        operations: list[WriteOp] = []
        unfinished: list[Iterator[WriteOp]] = []
        for partition in active:
            operation = next(partition, None)
            if operation is not None:
                operations.append(operation)
                unfinished.append(partition)
        active = unfinished
        if not operations:
            break
        writer.write(operations)
        done += sum(len(operation.messages) + operation.gap for operation in operations)
        progress(done, total)
    writer.wait()
    log.delete_before({where: beginning_offset(files, *where) for where in partitions})


def plan(files: FileLog, where: TopicPartition) -> Iterator[WriteOp]:
    """The operations that write one partition.

    Raises BrokerError for a partition whose records cannot get their old offsets.
    """
    start = beginning_offset(files, *where)
    end = end_offset(files, *where)
    if start > MAX_GAP_OFFSETS:
        raise BrokerError(
            f"{where[0]}[{where[1]}] begins at {start:,}: an import would write as many"
            " placeholders; replay it from the files instead"
        )
    try:
        yield from plan_writes(where, start, end, read(files, *where, start, whole=False))
    except ValueError as error:
        raise BrokerError(f"{error}; replay it from the files instead") from None


def check_offsets(files: FileLog, log: Log) -> None:
    """Raise BrokerError if a partition does not begin and end at its old offsets.

    The writer has checked the offset of each record already.
    """
    for topic, partition in _partitions(files):
        start = beginning_offset(log, topic, partition)
        end = end_offset(log, topic, partition)
        old_start = beginning_offset(files, topic, partition)
        old_end = end_offset(files, topic, partition)
        if (start, end) != (old_start, old_end):
            raise BrokerError(
                f"{topic}[{partition}] goes from {start} to {end} after the import, not from"
                f" {old_start} to {old_end}"
            )


def _partitions(files: FileLog) -> Iterator[TopicPartition]:
    for topic, count in files.topics().items():
        for partition in range(count):
            yield topic, partition
