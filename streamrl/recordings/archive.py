"""A run to files and back: every topic with keys, headers, timestamps, tombstones and offsets.

Offsets are part of a run: journals say by them what a part has read, fates which rollout they
belong to. So the way back gives every record its old one (`log/offsets.py`), and journals replay
as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config import topology
from streamrl.config.choices import NAME
from streamrl.config.plugins import is_import
from streamrl.config.run_file import RunFile, load, recorded
from streamrl.config.secrets import is_reference
from streamrl.errors import BrokerError, ConfigError, ExportError
from streamrl.log import topics
from streamrl.log.kafka import KafkaLog
from streamrl.log.kafka_import import OffsetPreservingWriter
from streamrl.log.offsets import WriteOp, plan_writes
from streamrl.log.parquet import (
    MAX_GAP_OFFSETS,
    ExportedPartition,
    ExportManifest,
    FileLog,
    write_manifest,
    write_partition,
)
from streamrl.log.protocol import Log, Message, TopicPartition, beginning_offset, end_offset, read
from streamrl.processor.journal import last_record
from streamrl.recordings.progress import OnProgress, no_progress
from streamrl.records import RunConfig

AT_ONCE = 16  # partitions written side by side: one transaction serves them all
EVERY = 1_000  # records between two reports


# ---- to files ------------------------------------------------------------------------------------


def export(log: Log, run: RunFile, directory: Path, progress: OnProgress = no_progress) -> FileLog:
    """Write all topics of a run to `directory`, which appears when it is complete. Raises
    ExportError when there is something already.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ExportError(
            f"{directory} exists and is not an empty directory; give another one, or remove it"
        )
    bounds = {where: (beginning_offset(log, *where), end) for where, end in ends(log).items()}
    total = sum(end - start for start, end in bounds.values())
    before = 0
    written: dict[str, list[ExportedPartition]] = {topic: [] for topic in sorted(log.topics())}
    part = directory.absolute().with_name(f".{directory.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        for where, (start, end) in sorted(bounds.items()):
            messages = counted(
                read(log, *where, start, end, whole=False), before - start, total, progress
            )
            written[where[0]].append(write_partition(part, where, start, end, messages))
            before += end - start
        write_manifest(part, ExportManifest(run.run, shareable(as_recorded(log, run)), written))
        part.replace(directory)
    except BaseException:
        shutil.rmtree(part)
        raise
    return FileLog(directory)


def ends(log: Log) -> dict[TopicPartition, int]:
    """Where each partition ends. Of a run that goes on, what was written first is looked at last:
    journals, then what came of them, then rollouts; so whatever a record of the export refers to is
    in it.
    """
    order = sorted(
        log.topics().items(),
        key=lambda item: (
            item[0].startswith("rollouts."),
            not item[0].startswith("journal."),
            item[0],
        ),
    )
    return {(topic, p): end_offset(log, topic, p) for topic, count in order for p in range(count)}


def counted(
    messages: Iterator[Message], before: int, total: int, progress: OnProgress
) -> Iterator[Message]:
    for index, message in enumerate(messages):
        if index % EVERY == 0:
            progress(before + message.offset, total)
        yield message


def as_recorded(log: Log, run: RunFile) -> RunFile:
    """The run file last recorded in the run itself; `run` where there is none that can be read."""
    if topology.CONFIG not in log.topics():
        return run
    last = last_record(log, topology.CONFIG, RunConfig)
    try:
        if last is None:
            return run
        # it was recorded without what secrets stood there
        return recorded({**msgspec.json.decode(last.text), "kafka": {}}, "config")
    except (ConfigError, msgspec.DecodeError):  # written by another version of streamrl
        return run


def shareable(run: RunFile) -> dict[str, object]:
    """The run file without what belongs to one machine or cluster."""
    return run.model_copy(update={"kafka": {}, "runs_dir": "runs"}).model_dump(mode="json")


# ---- and back ------------------------------------------------------------------------------------


def run_of(files: FileLog, name: str = "", runs_dir: str = "runs") -> RunFile:
    """The run file of an export; `name`: of the run that is to be made of it, whose old records no
    retention shall delete.

    An export may be anybody's. What its run file says of a machine is left out, and so is code that
    a run of that name in `runs_dir` does not name.
    """
    own = Path(runs_dir) / files.manifest.run / "run.yaml"
    named = (
        load(own).imported
        if NAME.fullmatch(files.manifest.run) and own.is_file()
        else frozenset[str]()
    )
    run = recorded(
        {**_foreign(files.manifest.run_file, named), "imports": sorted(named)}, str(files.directory)
    )
    if not name:
        return run
    kept = {**run.topics.model_dump(), "config": {**run.topics.config, "retention.ms": "-1"}}
    return recorded({**run.model_dump(), "run": name, "topics": kept}, str(files.directory))


def _foreign(run_file: dict[str, Any], named: frozenset[str]) -> dict[str, Any]:
    """A run file that somebody else wrote, without what would act here: its cluster, directories,
    programs, sinks, variables and code not `named`.
    """
    sections = {
        name: inner
        for name, inner in run_file.items()
        if name not in ("kafka", "runs_dir", "imports", "metrics")
    }
    for section, local in {
        "inference": ("python", "extra_args", "host", "port", "api_key"),
        "orchestrator": ("sinks",),
    }.items():
        if isinstance(there := sections.get(section), dict):
            sections[section] = {name: inner for name, inner in there.items() if name not in local}
    learner = sections.get("learner")
    if (
        isinstance(learner, dict)
        and is_import(learner.get("loss"))
        and learner["loss"] not in named
    ):
        # which belongs to its loss
        sections["learner"] = {
            name: inner for name, inner in learner.items() if name != "correction"
        }
    return _without_code(sections, named)


def _without_code(value: Any, named: frozenset[str]) -> Any:
    """The same settings, but those that name a variable or code of others; a section that is
    nothing without it goes as a whole.
    """

    def acts(inner: Any) -> bool:
        return is_reference(inner) or (is_import(inner) and inner not in named)

    if isinstance(value, dict):
        rewards = [
            name
            for name, inner in value.items()
            if isinstance(inner, dict) and set(inner) == {"kind", "params"} and acts(inner["kind"])
        ]
        return {
            name: _without_code(inner, named)
            for name, inner in value.items()
            if not acts(inner) and name not in rewards
        }
    if isinstance(value, list):
        return [_without_code(inner, named) for inner in value if not acts(inner)]
    return value


def restore(
    files: FileLog, run: RunFile, kafka: dict[str, object], progress: OnProgress = no_progress
) -> None:
    """Make the topics of `run` on a Kafka and write what the files hold, each record at its old
    offset; or raise and leave nothing.

    Raises ConfigError when the run has topics there, BrokerError where a record cannot have its
    offset again.
    """
    topics.create(run, kafka, files.topics())
    try:
        log = KafkaLog(kafka, run.run)
        rewrite(files, log, progress)
        check(files, log)
    except BaseException:
        topics.delete(run, kafka)
        raise


def rewrite(files: FileLog, log: KafkaLog, progress: OnProgress) -> None:
    """Fill the partitions side by side, a step of each at a time."""
    waiting = iter([(topic, p) for topic, count in files.topics().items() for p in range(count)])
    total = sum(
        end_offset(files, topic, p) for topic, count in files.topics().items() for p in range(count)
    )
    done = 0
    active: list[Iterator[WriteOp]] = []
    writer = OffsetPreservingWriter(log)
    while True:
        active += (plan(files, where) for where in islice(waiting, AT_ONCE - len(active)))
        turn = [(op, partition) for partition in active if (op := next(partition, None))]
        active = [partition for _, partition in turn]
        if not turn:
            break
        writer.write([op for op, _ in turn])
        done += sum(len(op.messages) + op.gap for op, _ in turn)
        progress(done, total)
    writer.wait()
    log.delete_before(
        {
            (topic, p): beginning_offset(files, topic, p)
            for topic, count in files.topics().items()
            for p in range(count)
        }
    )


def plan(files: FileLog, where: TopicPartition) -> Iterator[WriteOp]:
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


def check(files: FileLog, log: Log) -> None:
    """Do all partitions begin and end where they did? That each record got its offset was checked
    when it was written.
    """
    for topic, count in files.topics().items():
        for p in range(count):
            there = (beginning_offset(log, topic, p), end_offset(log, topic, p))
            wanted = (beginning_offset(files, topic, p), end_offset(files, topic, p))
            if there != wanted:
                raise BrokerError(
                    f"{topic}[{p}] goes from {there[0]} to {there[1]} after the import, not from"
                    f" {wanted[0]} to {wanted[1]}"
                )
