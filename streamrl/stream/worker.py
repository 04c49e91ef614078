"""The one loop of every part: poll, decode, step, one transaction. Facts enter `step` as arguments: a journal entry is enough to run a turn again.

A turn's outputs and its journal entry, which names its inputs, commit or abort together. A part that starts folds its journal, outputs thrown
away, and is where it was. A transaction that fails ends the process (`errors.TransactionFailed`); the supervisor starts the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from streamrl.errors import StreamrlError, TopicMissing
from streamrl.imports import imports_in
from streamrl.metrics import METRICS, Meter
from streamrl.records import JournalEntry, Slice, Snapshot
from streamrl.stream.breaker import Breaker
from streamrl.stream.codec import digest, to_event, to_message
from streamrl.stream.dead_letters import TOPIC, Letter, letter_of, reject
from streamrl.stream.journal import Tape, entries, newest, noted
from streamrl.stream.log import Event, Log, Message, Output, Positions, Reader, TopicPartition, Undecodable, Writer
from streamrl.stream.retrying import RetryingWriter
from streamrl.stream.snapshots import freeze, thaw
from streamrl.stream.watched import ready

logger = logging.getLogger(__name__)
S = TypeVar("S")
C = TypeVar("C")

TURN_MESSAGES = 512  # more in one transaction are not faster: its outputs leave the processor's cache
PIECE_MESSAGES = 64  # of them at a time: half a megabyte of rollouts, which are still in that cache when they are folded in
POLL_S = 0.015  # half of it is latency of every part; shorter ones cost transactions
SNAPSHOT_EVENTS = 5_000  # a restart folds at most so many, and reads the records held
SNAPSHOT_BYTES = 4_000_000  # of one record
REPORT_S = 1.0


class Report(NamedTuple):
    """What a part says of itself between turns: gauges, and sentences for its log."""

    values: dict[str, float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part(Generic[C, S]):
    """A part as the loop sees it. `step`, `paused` and `report` are pure: no clock, no randomness, no files."""

    name: str  # its identity: one process at a time has it
    inputs: Mapping[str, tuple[str, ...]]  # topic -> schemas it may carry
    config: C  # frozen, of plain values; goes into the journal as JSON
    initial: Callable[[], S]
    step: Callable[[C, S, Iterable[Event], float], tuple[S, list[Output]]]  # (config, state, events, time_s); takes every event, may use up the state
    paused: Callable[[C, S], frozenset[str]] = lambda config, state: frozenset()  # topics to take nothing from for now
    report: Callable[[C, S, float], Report] = lambda config, state, time_s: Report({})  # never part of the outputs
    snapshot_events: int = SNAPSHOT_EVENTS
    imports: frozenset[str] = frozenset()  # MODULE:NAME that a configuration in its journal may have: those of the user's own run file
    max_invalid_frac: float = 1.0  # of a topic's records: beyond it the topic is left alone for a while (`breaker.py`); never part of the fold


@dataclass
class Fold(Generic[C, S]):
    """Where a part is: its state after entry `sequence`, the next offset of every input, and the configuration last recorded."""

    state: S
    config: C | None = None
    sequence: int = -1
    positions: dict[TopicPartition, int] = field(default_factory=dict[Any, Any])
    snapshot_offset: int = -1
    events_since_snapshot: int = 0
    metrics: list[Message] = field(default_factory=list[Message])  # of the last entry that was folded again


def run(log: Log, part: Part[C, S], stop: threading.Event, clock: Callable[[], float] = time.time) -> None:
    """Be that part until `stop` is set."""
    started = time.monotonic()
    # First of all: the writer fences an earlier instance and ends what that left open. A fold is computed again, not retried.
    writer = RetryingWriter(log, part.name, f"journal.{part.name}", patience_s=0.0)
    fold, records_read = restore(log, part)
    fold.positions = {**starts(log, part.inputs), **fold.positions}
    reader, meter = log.reader(fold.positions), Meter(log, part.name)
    logger.info("%s: ready after %.2f s at entry %d, %d records read", part.name, time.monotonic() - started, fold.sequence, records_read)
    tally, breaker = Tally(), Breaker(part.max_invalid_frac)
    # Its last life may have ended before it could mark them; and a part that may not says so before it is ready.
    marked = dict(fold.positions) if writer.mark(fold.positions) else {}
    for message in fold.metrics:  # its last life may have ended between that transaction and these
        meter.send(message)
    ready(log)
    try:
        while not stop.is_set():
            reader.pause(part.paused(part.config, fold.state) | breaker.left_alone(clock()))
            if first := reader.poll(PIECE_MESSAGES, POLL_S):
                before = time.monotonic()
                done = turn(part, fold, ready_in(reader, first), clock(), writer.commit)
                for message in done.metrics:
                    meter.send(message)
                for sentence in breaker.count(done.taken, done.letters, clock()):
                    logger.warning("%s: %s", part.name, sentence)
                tally.count(done.taken.total(), time.monotonic() - before)
            if tally.elapsed_s >= REPORT_S:
                meter.publish({**gauges(part, fold.state, tally, clock()), **breaker.gauges(clock())})
                tally, marked = Tally(), mark(writer, fold.positions, marked)
        mark(writer, fold.positions, marked)
    finally:
        reader.close()
        writer.close()
        meter.close()


class Turned(NamedTuple):
    """What a turn leaves to the loop."""

    metrics: list[Message]  # they stay outside the transaction
    letters: list[Letter]  # what it put aside, in the transaction
    taken: Counter[str]  # records, by topic


def mark(writer: Writer, positions: Positions, marked: Positions) -> dict[TopicPartition, int]:
    """Mark the positions that are not marked yet. Returns those that are marked now."""
    moved = {where: offset for where, offset in positions.items() if marked.get(where) != offset}
    return dict(positions) if writer.mark(moved, wait=False) else dict(marked)


def ready_in(reader: Reader, messages: list[Message]) -> Iterator[Message]:
    """These messages and those that lie ready behind them, as many as a turn takes; the next are fetched when the ones before are folded in."""
    left = TURN_MESSAGES
    while messages:
        yield from messages
        left -= len(messages)
        messages = reader.poll(min(PIECE_MESSAGES, left), 0.0) if left else []


def turn(part: Part[C, S], fold: Fold[C, S], messages: Iterable[Message], time_s: float, commit: Callable[[Sequence[Message]], int]) -> Turned:
    """One turn: fold the messages in and commit what comes of it."""
    slices, taken = list[Slice](), Counter[str]()
    fold.state, outputs, metrics = apply(part, part.config, fold.state, noted(messages, fold.positions, slices), time_s)
    for piece in slices:
        taken[piece.topic] += piece.count
    changed, fold.config = part.config != fold.config, part.config
    fold.sequence += 1
    fold.events_since_snapshot += taken.total()
    snapshots = snapshot(fold) if fold.events_since_snapshot >= part.snapshot_events else []
    entry = JournalEntry(
        sequence=fold.sequence,
        time_s=time_s,
        slices=slices,
        digest=digest(outputs),
        output_count=len(outputs),
        snapshot_offset=fold.snapshot_offset,
        config=to_json(part.config) if changed else "",
    )
    journal = [to_message(Output(f"journal.{part.name}", part.name, record)) for record in (*snapshots, entry)]
    offset = commit([*outputs, *journal])
    if snapshots:  # only now it is known where it lies, right before the entry: the next one says so
        fold.snapshot_offset, fold.events_since_snapshot = offset - len(snapshots), 0
    return Turned(metrics, [letter for message in outputs if message.topic.startswith(TOPIC) and (letter := letter_of(message))], taken)


def apply(part: Part[C, S], config: C, state: S, messages: Iterable[Message], time_s: float) -> tuple[S, list[Message], list[Message]]:
    """`step` over what can be read; what cannot be read is put aside. Returns (state, outputs, metrics)."""
    rejected = list[Output]()

    def readable() -> Iterator[Event]:
        """Each is decoded when its turn comes: what it touches is still in the processor's cache then."""
        for message in messages:
            event = to_event(message, part.inputs[message.topic])
            if isinstance(event.record, Undecodable):
                rejected.extend(reject(event, event.record.cause))
            elif event.record is None:  # inputs of parts are never compacted: a null record means nothing there
                rejected.extend(reject(event, "the record is empty"))
            else:
                yield event

    state, outputs = part.step(config, state, readable(), time_s)
    made = [to_message(output) for output in (*rejected, *outputs)]
    return state, [m for m in made if m.topic != METRICS], [m for m in made if m.topic == METRICS]


def snapshot(fold: Fold[Any, Any]) -> list[Snapshot]:
    """The state after this turn, in as many records as it needs."""
    data = freeze(fold.state)
    pieces = [data[i : i + SNAPSHOT_BYTES] for i in range(0, len(data), SNAPSHOT_BYTES)]
    positions = [(topic, partition, offset) for (topic, partition), offset in fold.positions.items()]
    make = partial(Snapshot, sequence=fold.sequence, positions=positions, config=to_json(fold.config), parts=len(pieces))
    return [make(state=piece, part=i) for i, piece in enumerate(pieces)]


def restore(log: Log, part: Part[C, S]) -> tuple[Fold[C, S], int]:
    """The part where it was: its last snapshot, the records that holds, and the entries since, outputs thrown away. Also the records read."""
    topic = f"journal.{part.name}"
    last, fold, tape = newest(log, topic, JournalEntry), Fold(part.initial()), Tape(log, dict(part.inputs))
    if last is None:
        return fold, 0
    pieces: list[Snapshot] = []
    unnamed = -1, -1  # (offset, sequence) of a snapshot behind the one that is named: its part died before the next entry
    for offset, record in entries(log, topic, max(last.snapshot_offset, 0)):
        if isinstance(record, Snapshot):
            unnamed = (offset, record.sequence) if record.part == 0 and offset > last.snapshot_offset else unnamed
            if offset - last.snapshot_offset == len(pieces) and len(pieces) <= record.part:
                pieces.append(record)
                if len(pieces) == record.parts:
                    fold.state = thaw(b"".join(piece.state for piece in pieces), type(fold.state), tape.fetch)
                    fold.sequence, fold.snapshot_offset = record.sequence, last.snapshot_offset
                    fold.config = from_json(record.config, part)
                    fold.positions = {(t, p): o for t, p, o in record.positions}
        elif isinstance(record, JournalEntry) and record.sequence > fold.sequence:
            outputs = refold(part, fold, record, tape)
            if digest(outputs) != record.digest:
                differ = f"{len(outputs)} outputs that differ from the {record.output_count} recorded"
                raise StreamrlError(f"{part.name}: entry {record.sequence} gives {differ}; the code has changed since")
            if unnamed[1] == record.sequence:
                fold.snapshot_offset, fold.events_since_snapshot = unnamed[0], 0
    tape.close()
    return fold, tape.records_read


def refold(part: Part[C, S], fold: Fold[C, S], entry: JournalEntry, tape: Tape) -> list[Message]:
    """Run one entry again. Returns the outputs it gives now, to be compared with those recorded."""
    if entry.sequence != fold.sequence + 1:
        raise StreamrlError(f"journal.{part.name} jumps from entry {fold.sequence} to {entry.sequence}; it has been tampered with")
    if entry.config:
        fold.config = from_json(entry.config, part)
    assert fold.config is not None, "the first entry carries the configuration"
    messages = [message for piece in entry.slices for message in tape.messages(piece)]
    fold.state, outputs, fold.metrics = apply(part, fold.config, fold.state, messages, entry.time_s)
    fold.sequence = entry.sequence
    fold.events_since_snapshot += len(messages)
    fold.positions.update({(piece.topic, piece.partition): piece.end for piece in entry.slices})
    return outputs


def starts(log: Log, topics: Iterable[str]) -> dict[TopicPartition, int]:
    """The first offset of every partition of these topics. Two questions, however many there are: a run may have hundreds of envs."""
    there = log.topics()
    return log.starts([(topic, p) for topic in topics for p in range(_partitions(log, there, topic))])


def partitions(log: Log, topic: str) -> int:
    return _partitions(log, log.topics(), topic)


def _partitions(log: Log, there: Mapping[str, int], topic: str) -> int:
    if topic not in there:
        log.reader({(topic, 0): 0}).close()  # a log that knows why it does not see the topic says so: it may not be this process's to read
        raise TopicMissing(f"topic {topic} is missing; create it with `streamrl topics apply RUN.yaml`")
    return there[topic]


def to_json(config: Any) -> str:
    return msgspec.json.encode(config).decode()


def from_json(text: str, part: Part[C, S]) -> C:
    """The configuration that a journal recorded. Raises StreamrlError where it names code that the user's run file does not."""
    for name in imports_in(msgspec.json.decode(text)):
        if name not in part.imports:
            never = "nothing is imported because a log names it"
            raise StreamrlError(f"journal.{part.name} names {name!r}, the run file does not, and {never}; is it yours? Add it to `imports` there")
    return msgspec.json.decode(text, type=type(part.config))


@dataclass
class Tally:
    """What the loop did since the last report."""

    started: float = field(default_factory=time.monotonic)
    events: int = 0
    turns: int = 0
    busy_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def count(self, events: int, busy_s: float) -> None:
        self.events, self.turns, self.busy_s = self.events + events, self.turns + 1, self.busy_s + busy_s


def gauges(part: Part[C, S], state: S, tally: Tally, time_s: float) -> dict[str, float]:
    """The part's own gauges and the loop's; its warnings go to the log."""
    report, elapsed_s = part.report(part.config, state, time_s), tally.elapsed_s
    for warning in report.warnings:
        logger.warning("%s: %s", part.name, warning)
    loop = {
        "worker/events_per_s": tally.events / elapsed_s,
        "worker/turn_s": tally.busy_s / max(tally.turns, 1),
        "worker/busy_frac": tally.busy_s / elapsed_s,
    }
    return {**report.values, **loop}
