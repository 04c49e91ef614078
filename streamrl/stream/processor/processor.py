"""The one loop of every processor: poll, decode, step, one transaction.

Facts enter `step` as arguments, so a journal entry is enough to make a step again. The outputs of a
batch of records and its journal entry, which names those records, are committed together or not at
all. A processor that starts replays its journal, throws the outputs away, and is where it was. A
transaction that fails is looked for and committed again (`stream/log/retrying.py`), so that an
outage of the broker does not end the process.

A snapshot of the state is written after a number of events, after a time, and when the processor is
told to stop. The last two are for retention: what was taken since the last snapshot, and what that
holds, must still be in the log when the processor starts again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streamrl.stream.log.protocol import Log, Message, Offsets, Reader, TopicPartition
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.stream.processor.circuit_breaker import CircuitBreaker
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.joiner import open_reader
from streamrl.stream.processor.notices import Notices
from streamrl.stream.processor.part import open_part
from streamrl.stream.processor.reconcile import reconcile
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.retention import held_but_deleted
from streamrl.stream.processor.snapshots import save_last_snapshot, save_snapshot
from streamrl.stream.processor.transaction import process_batch

logger = logging.getLogger(__name__)
S = TypeVar("S")
C = TypeVar("C")

# More records in one transaction are not faster: its outputs leave the CPU's cache.
MAX_POLL_RECORDS = 512
# A transaction is to be written within seconds, whatever the size of a rollout.
MAX_POLL_BYTES = 32_000_000
# Records fetched at a time: half a megabyte of rollouts, which are still in the CPU's cache when
# the step takes them.
FETCH_RECORDS = 64
POLL_S = 0.015  # half of it is latency of every part; shorter ones cost transactions
REPORT_S = 1.0


def run_processor(
    log: Log,
    processor: Processor[C, S],
    stop: threading.Event,
    clock: Callable[[], float] = time.time,
) -> None:
    """Run this processor until `stop` is set."""
    writer = RetryingWriter(log, processor.name, processor.journal, stop=stop)
    with open_part(log, processor.name, writer) as part:
        current, inputs = start(log, processor, writer, clock)
        reader = open_reader(log, processor, {tp: current.offsets[tp] for tp in inputs})

        def positions() -> Offsets:
            return {tp: reader.position(*tp) for tp in inputs}

        with closing(reader):
            offsets = InputOffsets(writer, current, inputs)
            # The process before this one may have ended before it could commit them. A processor
            # without that right fails here, before it is ready.
            offsets.commit(wait=True)
            # It may also have ended between its last transaction and these metrics.
            for message in current.metrics:
                part.meter.send(message)
            part.mark_ready()
            breaker = CircuitBreaker(processor.max_invalid_frac)
            notices = Notices()
            stats = LoopStats()
            backlog = Backlog(log.end_offsets(inputs))
            while not stop.is_set():
                paused = processor.paused(processor.config, current.state)
                reader.set_paused(paused | breaker.paused_topics(clock()))
                first = reader.poll(FETCH_RECORDS, POLL_S)
                report_due = stats.elapsed_s >= REPORT_S
                if first or (
                    report_due and processor.due(processor.config, current.state, clock())
                ):
                    began = time.monotonic()
                    is_behind = backlog.is_unread(reader, paused)
                    batch = drain_available(reader, first)
                    done = process_batch(
                        processor,
                        current,
                        batch,
                        clock(),
                        writer.commit,
                        positions=positions,
                        is_behind=is_behind,
                    )
                    for message in done.metrics:
                        part.meter.send(message)
                    warn(processor, breaker.count(done.taken, done.invalid, clock()))
                    notices.count(done.failed, done.letters)
                    stats.count(done.taken.total(), time.monotonic() - began)
                warn(processor, notices.due(time.monotonic()))
                if stats.elapsed_s >= REPORT_S:
                    values = report(processor, current.state, clock())
                    part.meter.publish({**values, **stats.gauges(), **breaker.gauges(clock())})
                    offsets.commit(wait=False)
                    note_unsaved(current, positions(), clock())
                    stats = LoopStats()
                if snapshot_due(processor, current, clock()):
                    save_snapshot(processor, current, positions(), writer.commit)
                    warn(processor, held_but_deleted(log, processor, current))
            note_unsaved(current, positions(), clock())
            if current.unsaved_since_s is not None:
                save_last_snapshot(processor, current, positions(), writer.commit)
            offsets.commit(wait=False)


def start(
    log: Log, processor: Processor[C, S], writer: RetryingWriter, clock: Callable[[], float]
) -> tuple[ProcessorState[C, S], list[TopicPartition]]:
    """The processor where it was, in line with its configuration; and the partitions it reads."""
    started = time.monotonic()
    current, records_read = restore(log, processor)
    partitions = processor.partitions(log)
    begin = log.beginning_offsets(partitions)
    end = log.end_offsets(partitions)
    warn(processor, reconcile(log, processor, current, begin, clock(), writer.commit))
    for tp, first in begin.items():
        offset = current.offsets.get(tp, first)
        # A topic that was deleted and made again is read from its beginning.
        current.offsets[tp] = max(offset, first) if offset <= end[tp] else first
    logger.info(
        "%s: ready after %.2f s at entry %d, %d records read",
        processor.name,
        time.monotonic() - started,
        current.sequence,
        records_read,
    )
    return current, list(begin)


def bytes_of(message: Message) -> int:
    """Bytes of the values of a message and of those that it refers to."""
    return sum(len(each.value or b"") for each in (message, *message.joined))


def drain_available(reader: Reader, messages: list[Message]) -> Iterator[Message]:
    """These messages and those available after them, as many as a batch takes. The next ones are
    fetched when the step has taken those before.
    """
    left = MAX_POLL_RECORDS
    left_bytes = MAX_POLL_BYTES
    while messages:
        yield from messages
        left -= len(messages)
        left_bytes -= sum(map(bytes_of, messages))
        if left <= 0 or left_bytes <= 0:
            return
        messages = reader.poll(min(FETCH_RECORDS, left), 0.0)


def note_unsaved(current: ProcessorState[Any, Any], positions: Offsets, time_s: float) -> None:
    """Have a snapshot made after a while also if nothing was taken, but a reader is after markers
    and aborted records that no offset in the journal is after.
    """
    if current.unsaved_since_s is None and any(
        position > current.offsets[tp] for tp, position in positions.items()
    ):
        current.unsaved_since_s = time_s


def snapshot_due(
    processor: Processor[Any, Any], current: ProcessorState[Any, Any], time_s: float
) -> bool:
    """Whether there has been no snapshot for `snapshot_s`, or the clock was set back by as much."""
    since_s = current.unsaved_since_s
    return since_s is not None and abs(time_s - since_s) >= processor.snapshot_s


def report(processor: Processor[C, S], state: S, time_s: float) -> dict[str, float]:
    """The processor's own gauges. Its warnings go to the log."""
    values, warnings = processor.report(processor.config, state, time_s)
    warn(processor, warnings)
    return values


def warn(processor: Processor[Any, Any], warnings: Iterable[str]) -> None:
    for warning in warnings:
        logger.warning("%s: %s", processor.name, warning)


@dataclass
class Backlog:
    """The records that were in the log when the processor started."""

    ends: dict[TopicPartition, int]  # of the partitions that have not been read so far

    def is_unread(self, reader: Reader, paused: Collection[str]) -> bool:
        """Whether some of them are still to be read. The topics that the processor does not want
        now (`Processor.paused`) do not count.
        """
        self.ends = {tp: end for tp, end in self.ends.items() if reader.position(*tp) < end}
        return any(topic not in paused for topic, _ in self.ends)


@dataclass
class InputOffsets:
    """Commits how far a processor has read, for people and tools that look at its lag."""

    writer: RetryingWriter
    current: ProcessorState[Any, Any]
    inputs: list[TopicPartition]
    committed: dict[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])

    def commit(self, wait: bool) -> None:
        """Commit the offsets that have moved. If the log does not take them now, the next commit
        does.
        """
        offsets = {tp: self.current.offsets[tp] for tp in self.inputs}
        moved = {tp: at for tp, at in offsets.items() if self.committed.get(tp) != at}
        if self.writer.commit_offsets(moved, wait=wait):
            self.committed = offsets


@dataclass
class LoopStats:
    """What the loop did since the last report."""

    started_s: float = field(default_factory=time.monotonic)
    events: int = 0
    batches: int = 0
    busy_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def count(self, events: int, busy_s: float) -> None:
        self.events += events
        self.batches += 1
        self.busy_s += busy_s

    def gauges(self) -> dict[str, float]:
        elapsed_s = self.elapsed_s
        return {
            "worker/events_per_s": self.events / elapsed_s,
            "worker/process_latency_s": self.busy_s / max(self.batches, 1),
            "worker/busy_frac": self.busy_s / elapsed_s,
        }
