"""Assembler, buffer and batcher over a log in memory, given one poison among good rollouts of two
envs, and what became of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.dead_letters import letters
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log import memory, topics
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output, partitions_of
from streamrl.stream.log.reading import read
from streamrl.stream.processor import joiner
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.joiner import open_reader
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Batch, Fate, PolicyVersion
from tests.support.build import rollout

ENVS = ("copy", "add")  # the poison is copy's
VOCAB = 1_000  # token ids that the policy has
VERSIONS = 4
MEMORY_MIB = 32  # that the parts and the log may take
# and so many times what was sent: read, held, scored, put aside, and copied on the way
MEMORY_TIMES = 8


class Outcome(NamedTuple):
    """What became of a poison."""

    ends: list[str]  # of its records: fates with their causes, or the causes of dead letters
    wrong: str  # what is wrong with that, in a line; empty: nothing


def log_for(run: RunFile) -> MemoryLog:
    counts = {
        topic.name.removeprefix(f"{run.run}."): topic.partitions for topic in topics.plan(run)
    }
    return MemoryLog(counts)


def announcement(version: int) -> Message:
    batch = version - 1 if version else None
    record = PolicyVersion(
        learner="lead",
        version=version,
        uri="",
        size_bytes=0,
        sha256="",
        batch=batch,
        vocab_size=VOCAB,
    )
    return to_message(Output("policy-versions", "lead", record))


def good(run: RunFile, version: int) -> list[Message]:
    """Ten groups of each env."""
    size = run.buffer.group_size
    made = [
        rollout(env, f"{env}-{version}-{n}", i, version, reward=float(i % 2))
        for n in range(10)
        for env in ENVS
        for i in range(size)
    ]
    return [
        to_message(Output(topology.rollouts(record.environment), record.group_id, record))
        for record in made
    ]


def take_all(log: MemoryLog, part: Processor[Any, Any], time_s: float) -> None:
    """One life of a part: it takes all there is, and ends."""
    writer = log.writer(part.name)
    fold, _ = restore(log, part)
    fold.offsets = {**log.beginning_offsets(partitions_of(log, part.inputs)), **fold.offsets}
    reader = open_reader(log, part, fold.offsets)
    for _ in range(10_000):
        reader.set_paused(part.paused(part.config, fold.state))
        messages = reader.poll(64, 0.0)
        process_batch(part, fold, messages, time_s, writer.commit)
        if not messages:
            return
    raise AssertionError(f"{part.name} does not come to an end")


def given(run: RunFile, poison: Sequence[Message], compressed: bool) -> Outcome:
    """The whole story: a version, the poison, good rollouts; another version, and more of them.

    `compressed`: a message on its way was small enough for a broker, and is not cut in chunks.
    """
    log = log_for(run)
    parts = list(processors_of(run).values())
    log.append([announcement(0)], marker=False)
    for part in parts:
        take_all(log, part, 0.0)
    with patch.object(memory, "split", lambda messages: messages) if compressed else nullcontext():
        # a record lies where its last chunk does
        places = [
            (message.topic, log.append([message], marker=False)[-1].offset) for message in poison
        ]
    before_mib = new_peak_mib()
    try:
        # What is not there now will not come.
        with patch.object(joiner, "IDLE_S", 0.0):
            for version in range(VERSIONS):
                if version:
                    log.append([announcement(version)], marker=False)
                log.append(good(run, version), marker=False)
                for part in parts:
                    take_all(log, part, 1000.0 * version)
    except Exception as error:
        return Outcome([], f"ended the {part.name}: {type(error).__name__}: {error}"[:200])
    sent_mib = sum(len(message.value or b"") for message in poison) / 2**20
    peak_mib = memory_mib("VmHWM") - before_mib
    if peak_mib > MEMORY_MIB + MEMORY_TIMES * sent_mib:
        return Outcome([], f"took {peak_mib:.0f} MiB of memory for {sent_mib:.0f}")
    return judged(run, log, parts, places)


def new_peak_mib() -> float:
    """Forget how much memory this process has had at most, and return how much it has."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


def memory_mib(what: str) -> float:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    ]
    return int(line.split()[1]) / 1024


def judged(
    run: RunFile,
    log: MemoryLog,
    parts: Sequence[Processor[Any, Any]],
    places: Sequence[tuple[str, int]],
) -> Outcome:
    fates: dict[tuple[str, int], list[str]] = {}
    for message in read(log, "fates", 0, 0):
        record = to_event(message, ("fate",)).record
        for offset in record.offsets.tolist() if isinstance(record, Fate) else ():
            fates.setdefault((topology.rollouts(record.environment), offset), []).append(
                ": ".join(filter(None, (record.fate, record.cause)))
            )
    aside = {
        (topic, letter.offset): letter.cause
        for topic in {topic for topic, _ in places}
        for letter in letters(log, topic)
    }
    ends = list[str]()
    for place in places:
        if place[0].startswith("rollouts.") and len(fates.get(place, [])) != 1:
            return Outcome(
                fates.get(place, []),
                f"the record at {place[1]} has {len(fates.get(place, []))} fates",
            )
        ends += fates.get(place, []) or [
            f"dead letter: {aside[place]}" if place in aside else "passed over"
        ]
    account = audit(log, run)
    if not account.balanced:
        return Outcome(ends, f"the audit does not balance: {account.problems[:1]}")
    for part in parts:
        if difference := replay(log, part)[0].difference:
            return Outcome(ends, f"the replay differs: {difference}"[:200])
    batches = [
        record
        for m in read(log, "batches", 0, 0)
        if isinstance(record := to_event(m, ("batch",)).record, Batch)
    ]
    if len(batches) < VERSIONS or not any("add" in batch.environments for batch in batches):
        return Outcome(ends, f"the other env did not go on: {len(batches)} batches of {VERSIONS}")
    return Outcome(ends, "")
