"""A run to files and back: every topic with keys, headers, timestamps, tombstones and offsets.

Offsets are part of a run: journals say by them what a part has read, fates which rollout they belong to. So the way back gives every record its old
one (`stream/offsets.py`), and journals replay as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from streamrl import config, topics
from streamrl.config import RunFile
from streamrl.errors import BrokerError, ConfigError, ExportError
from streamrl.records import RunConfig
from streamrl.replay.progress import Report, silent
from streamrl.stream.files import FileLog, Manifest, Partition, write_manifest, write_partition
from streamrl.stream.journal import newest
from streamrl.stream.kafka import KafkaLog
from streamrl.stream.log import Log, Message, TopicPartition, read
from streamrl.stream.offsets import Step, steps

AT_ONCE = 16  # partitions written side by side: one transaction serves them all
EVERY = 1_000  # records between two reports


# ---- to files ---------------------------------------------------------------------------------------------------------------------------


def export(log: Log, run: RunFile, directory: Path, progress: Report = silent) -> FileLog:
    """Write all topics of a run to `directory`, which appears when it is complete. Raises ExportError when there is something already."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ExportError(f"{directory} exists and is not an empty directory; give another one, or remove it")
    bounds = {where: (log.start(*where), end) for where, end in ends(log).items()}
    total, before = sum(end - start for start, end in bounds.values()), 0
    written: dict[str, list[Partition]] = {topic: [] for topic in sorted(log.topics())}
    part = directory.absolute().with_name(f".{directory.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        for where, (start, end) in sorted(bounds.items()):
            messages = counted(read(log, *where, start, end), before - start, total, progress)
            written[where[0]].append(write_partition(part, where, start, end, messages))
            before += end - start
        write_manifest(part, Manifest(run.run, shareable(as_recorded(log, run)), written))
        part.replace(directory)
    except BaseException:
        shutil.rmtree(part)
        raise
    return FileLog(directory)


def ends(log: Log) -> dict[TopicPartition, int]:
    """Where each partition ends. Of a run that goes on, what was written first is looked at last: journals, then what came of them, then rollouts; so
    whatever a record of the export refers to is in it."""
    order = sorted(log.topics().items(), key=lambda item: (item[0].startswith("rollouts."), not item[0].startswith("journal."), item[0]))
    return {(topic, p): log.end(topic, p) for topic, count in order for p in range(count)}


def counted(messages: Iterator[Message], before: int, total: int, progress: Report) -> Iterator[Message]:
    for index, message in enumerate(messages):
        if index % EVERY == 0:
            progress(before + message.offset, total)
        yield message


def as_recorded(log: Log, run: RunFile) -> RunFile:
    """The run file last recorded in the run itself; `run` where there is none that can be read."""
    if "config" not in log.topics():
        return run
    last = newest(log, "config", RunConfig)
    try:
        return config.parse({**msgspec.json.decode(last.text), "kafka": {}}) if last else run  # it was recorded without what secrets stood there
    except (ConfigError, msgspec.DecodeError):  # written by another version of streamrl
        return run


def shareable(run: RunFile) -> dict[str, object]:
    """The run file without what belongs to one machine or cluster."""
    return run.model_copy(update={"kafka": {}, "runs_dir": "runs"}).model_dump(mode="json")


# ---- and back -----------------------------------------------------------------------------------------------------------------------------


def run_of(files: FileLog, name: str = "") -> RunFile:
    """The run file of an export; `name`: of the run that is to be made of it, whose old records no retention shall delete."""
    run = config.parse(files.manifest.run_file, str(files.directory))
    if not name:
        return run
    kept = {**run.topics.model_dump(), "config": {**run.topics.config, "retention.ms": "-1"}}
    return config.parse({**run.model_dump(), "run": name, "topics": kept}, str(files.directory))


def restore(files: FileLog, run: RunFile, kafka: dict[str, object], progress: Report = silent) -> None:
    """Make the topics of `run` on a Kafka and write what the files hold, each record at its old offset; or raise and leave nothing.

    Raises ConfigError when the run has topics there, BrokerError where a record cannot have its offset again.
    """
    topics.create(run, kafka, files.topics())
    try:
        log = KafkaLog(kafka, run.run)
        rewrite(files, log, progress)
        check(files, log)
    except BaseException:
        topics.delete(run, kafka)
        raise


def rewrite(files: FileLog, log: KafkaLog, progress: Report) -> None:
    """Fill the partitions side by side, a step of each at a time."""
    waiting = iter([(topic, p) for topic, count in files.topics().items() for p in range(count)])
    total, done = sum(files.end(topic, p) for topic, count in files.topics().items() for p in range(count)), 0
    active: list[Iterator[Step]] = []
    rewriter = log.rewriter()
    while True:
        active += (plan(files, where) for where in islice(waiting, AT_ONCE - len(active)))
        turn = [(step, partition) for partition in active if (step := next(partition, None))]
        active = [partition for _, partition in turn]
        if not turn:
            break
        rewriter.write([step for step, _ in turn])
        done += sum(len(step.messages) + step.hole for step, _ in turn)
        progress(done, total)
    rewriter.settle()
    log.delete_before({(topic, p): files.start(topic, p) for topic, count in files.topics().items() for p in range(count)})


def plan(files: FileLog, where: TopicPartition) -> Iterator[Step]:
    start, end = files.start(*where), files.end(*where)
    try:
        yield from steps(where, start, end, read(files, *where, start))
    except ValueError as error:
        raise BrokerError(f"{error}; replay it from the files instead") from None


def check(files: FileLog, log: Log) -> None:
    """Do all partitions begin and end where they did? That each record got its offset was checked when it was written."""
    for topic, count in files.topics().items():
        for p in range(count):
            there, wanted = (log.start(topic, p), log.end(topic, p)), (files.start(topic, p), files.end(topic, p))
            if there != wanted:
                raise BrokerError(f"{topic}[{p}] goes from {there[0]} to {there[1]} after the import, not from {wanted[0]} to {wanted[1]}")
