"""The one loop of every part: poll, decode, step, one transaction. Facts enter `step` as arguments:
a journal entry is enough to run a turn again.

A turn's outputs and its journal entry, which names its inputs, commit or abort together. A part
that starts folds its journal, outputs thrown away, and is where it was. A transaction that fails
ends the process (`errors.TransactionFailed`); the supervisor starts the next one.

A snapshot of the state is written after a number of events, after a time, and when the part is told
to stop. The last two are for retention: what was taken since the last snapshot, and what that
holds, must still be in the log when the part starts again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from streamrl.config import topology
from streamrl.config.plugins import imports_in
from streamrl.errors import InputGone, StreamrlError, TransactionFailed
from streamrl.log.codec import digest, to_event, to_message
from streamrl.log.dead_letters import TOPIC, DeadLetter, parse_dead_letter, to_dead_letter
from streamrl.log.meter import METRICS, Meter
from streamrl.log.protocol import (
    Event,
    Log,
    Message,
    Offsets,
    Output,
    Reader,
    TopicPartition,
    Undecodable,
    Writer,
    beginning_offset,
    partitions_of,
)
from streamrl.log.retrying import RetryingWriter
from streamrl.processor.circuit_breaker import CircuitBreaker
from streamrl.processor.journal import (
    SliceReader,
    entries,
    first_offsets,
    is_gone,
    last_record,
    record_slices,
)
from streamrl.processor.notices import Notices, failures
from streamrl.processor.snapshots import deserialize_state, held_events, references, serialize_state
from streamrl.records import Fate, JournalEntry, Record, Slice, Snapshot

logger = logging.getLogger(__name__)
S = TypeVar("S")
C = TypeVar("C")

# more in one transaction are not faster: its outputs leave the processor's cache
MAX_POLL_RECORDS = 512
# what is in a transaction is to be written within seconds, whatever the size of a rollout
MAX_POLL_BYTES = 32_000_000
# of them at a time: half a megabyte of rollouts, which are still in that cache when they are folded
# in
PIECE_MESSAGES = 64
POLL_S = 0.015  # half of it is latency of every part; shorter ones cost transactions
# a restart folds at most so many, and reads the records held; more where the state is large:
SNAPSHOT_EVENTS = 5_000
# journals are kept for ever, so snapshots take at most so many bytes of one for each event
SNAPSHOT_EVENT_BYTES = 100
SNAPSHOT_S = 21 * 3600.0  # an eighth of a retention of seven days
REPORT_S = 1.0


class Report(NamedTuple):
    """What a part says of itself between turns: gauges, and sentences for its log."""

    values: dict[str, float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Processor(Generic[C, S]):
    """A part as the loop sees it. `step`, `paused`, `due` and `report` are pure: no clock, no
    randomness, no files.
    """

    name: str  # its identity: one process at a time has it
    inputs: Mapping[str, tuple[str, ...]]  # topic -> schemas it may carry
    config: C  # frozen, of plain values; goes into the journal as JSON
    initial: Callable[[], S]
    # (config, state, events, time_s); takes every event, may use up the state
    step: Callable[[C, S, Iterable[Event], float], tuple[S, list[Output]]]
    # topics to take nothing from for now
    paused: Callable[[C, S], frozenset[str]] = lambda config, state: frozenset()
    # never part of the outputs
    report: Callable[[C, S, float], Report] = lambda config, state, time_s: Report({})
    reconcile: Callable[[C, S, Offsets, float], tuple[S, list[Output]]] = (
        lambda config, state, removed, time_s: (state, [])
    )
    """(config, state, removed, time_s): called at a start where the configuration has changed, or
    retention has deleted what the part needs (nothing is left below these offsets). It lets go, by
    fates, of what the state holds from there, and from topics that are no input any more.
    """
    # is a step without events to be made at this time? Asked once a second
    due: Callable[[C, S, float], bool] = lambda config, state, time_s: False
    snapshot_events: int = SNAPSHOT_EVENTS
    snapshot_s: float = SNAPSHOT_S
    # whether the part goes on without what retention has deleted; otherwise it ends with InputGone
    # at its start
    expires_removed: bool = False
    # MODULE:NAME that a configuration in its journal may have: those of the user's own run file
    imports: frozenset[str] = frozenset()
    # of a topic's records: beyond it the topic is not read for a while (`circuit_breaker.py`); never part
    # of the fold
    max_invalid_frac: float = 1.0

    def schemas_of(self, topic: str) -> tuple[str, ...]:
        """What a topic may carry that it reads, or has read: that of an env which has been taken
        out of the run carries what the others' do.
        """
        if topic in self.inputs:
            return self.inputs[topic]
        return {name.partition(".")[0]: schemas for name, schemas in self.inputs.items()}[
            topic.partition(".")[0]
        ]


@dataclass
class ProcessorState(Generic[C, S]):
    """Where a part is: its state after entry `sequence`, the next offset of every input, and the
    configuration last recorded.
    """

    state: S
    config: C | None = None
    sequence: int = -1
    positions: dict[TopicPartition, int] = field(default_factory=dict[Any, Any])
    snapshot_offset: int = -1
    events_since_snapshot: int = 0
    unsaved_since_s: float | None = None  # time of the first entry that is in no snapshot
    snapshot_bytes: int = 0  # of the last one
    # of the last entry that was folded again
    metrics: list[Message] = field(default_factory=list[Message])


def run_processor(
    log: Log, part: Processor[C, S], stop: threading.Event, clock: Callable[[], float] = time.time
) -> None:
    """Be that part until `stop` is set."""
    started = time.monotonic()
    # First of all: the writer fences an earlier instance and ends what that left open. A fold is
    # computed again, not retried.
    writer = RetryingWriter(log, part.name, topology.journal(part.name), patience_s=0.0)
    fold, records_read = restore(log, part)
    begin = log.beginning_offsets(partitions_of(log, part.inputs))
    for sentence in reconcile(log, part, fold, begin, clock(), writer.commit):
        logger.warning("%s: %s", part.name, sentence)
    positions = {
        where: max(fold.positions.get(where, first), first) for where, first in begin.items()
    }
    fold.positions.update(positions)
    reader, meter = log.reader(positions), Meter(log, part.name)
    logger.info(
        "%s: ready after %.2f s at entry %d, %d records read",
        part.name,
        time.monotonic() - started,
        fold.sequence,
        records_read,
    )
    tally, breaker, notices = Tally(), CircuitBreaker(part.max_invalid_frac), Notices()
    # Its last life may have ended before it could mark them; and a part that may not says so before
    # it is ready.
    marked = dict(positions) if writer.commit_offsets(positions) else {}
    for message in fold.metrics:  # its last life may have ended between that transaction and these
        meter.send(message)
    log.mark_ready()
    try:
        while not stop.is_set():
            reader.set_paused(part.paused(part.config, fold.state) | breaker.paused_topics(clock()))
            first = reader.poll(PIECE_MESSAGES, POLL_S)
            if first or (
                tally.elapsed_s >= REPORT_S and part.due(part.config, fold.state, clock())
            ):
                before = time.monotonic()
                done = process_batch(
                    part, fold, drain_available(reader, first), clock(), writer.commit
                )
                for message in done.metrics:
                    meter.send(message)
                for sentence in breaker.count(done.taken, done.letters, clock()):
                    logger.warning("%s: %s", part.name, sentence)
                notices.take(done.failed, done.letters)
                tally.count(done.taken.total(), time.monotonic() - before)
            for sentence in notices.due(time.monotonic()):
                logger.warning("%s: %s", part.name, sentence)
            if tally.elapsed_s >= REPORT_S:
                meter.publish(
                    {**gauges(part, fold.state, tally, clock()), **breaker.gauges(clock())}
                )
                tally, marked = (
                    Tally(),
                    commit_positions(
                        writer, {where: fold.positions[where] for where in begin}, marked
                    ),
                )
            # also where a clock was set back
            if (
                fold.unsaved_since_s is not None
                and abs(clock() - fold.unsaved_since_s) >= part.snapshot_s
            ):
                save(part, fold, reader, begin, writer.commit)
                for sentence in at_risk(log, fold):
                    logger.warning("%s: %s", part.name, sentence)
        if fold.unsaved_since_s is not None:
            save_if_possible(part, fold, reader, begin, writer.commit)
        commit_positions(writer, {where: fold.positions[where] for where in begin}, marked)
    finally:
        reader.close()
        writer.close()
        meter.close()


def save(
    part: Processor[C, S],
    fold: ProcessorState[C, S],
    reader: Reader,
    inputs: Iterable[TopicPartition],
    commit: Callable[[Sequence[Message]], int],
) -> None:
    """Write a snapshot in a transaction of its own, between two turns. Its positions lie behind the
    transaction markers that follow the last records: retention deletes these too.
    """
    positions = {where: max(fold.positions[where], reader.position(*where)) for where in inputs}
    record = snapshot(fold, {**fold.positions, **positions})
    offset = commit([to_message(Output(topology.journal(part.name), part.name, record))])
    saved(fold, offset, len(record.state))


def save_if_possible(
    part: Processor[C, S],
    fold: ProcessorState[C, S],
    reader: Reader,
    inputs: Iterable[TopicPartition],
    commit: Callable[[Sequence[Message]], int],
) -> None:
    """A part that is told to stop stops, also where the broker has gone before it."""
    try:
        save(part, fold, reader, inputs, commit)
    except TransactionFailed as error:
        logger.warning(
            "%s: stopped without a snapshot, so the next start folds more: %s", part.name, error
        )


def saved(fold: ProcessorState[Any, Any], offset: int, state_bytes: int) -> None:
    """Note that a snapshot of the state as it is lies at this offset of the journal."""
    fold.snapshot_offset, fold.snapshot_bytes = offset, state_bytes
    fold.events_since_snapshot, fold.unsaved_since_s = 0, None


def move_behind(fold: ProcessorState[Any, Any], removed: Offsets) -> None:
    """What retention has deleted is not read any more."""
    fold.positions.update(
        {
            where: max(fold.positions[where], offset)
            for where, offset in removed.items()
            if where in fold.positions
        }
    )


def at_risk(log: Log, fold: ProcessorState[Any, Any]) -> list[str]:
    """What the part holds although retention has deleted it: it can be used, but no restart can
    read it again.
    """
    held = Counter(
        (event.topic, event.partition, event.offset) for event in held_events(fold.state)
    )
    begin = first_offsets(log, {(topic, partition) for topic, partition, _ in held})
    if gone := sorted(
        {topic for topic, partition, offset in held if offset < begin[topic, partition]}
    ):
        return [
            f"holds records of {', '.join(gone)} that retention has deleted; a restart could not have them: lengthen topics.retention_hours"
        ]
    return []


def reconcile(
    log: Log,
    part: Processor[C, S],
    fold: ProcessorState[C, S],
    begin: Offsets,
    time_s: float,
    commit: Callable[[Sequence[Message]], int],
) -> list[str]:
    """Bring a restored state in line with the configuration of today, and with what retention has
    left, in an entry of its own.

    `begin`: first offsets of the inputs. Returns sentences for the log. Raises InputGone where
    something is gone and the part is not to go on without it.
    """
    if fold.sequence < 0:
        return []
    removed = {
        where: first
        for where, first in begin.items()
        if where in fold.positions and is_gone(fold.positions[where], first)
    }
    removed |= first_offsets(
        log,
        {
            (event.topic, event.partition)
            for event in held_events(fold.state)
            if event.record is None
        },
    )
    if not removed and fold.config == part.config:
        return []
    what = ""
    if gone := sorted(
        f"{topic}[{partition}] below offset {offset}"
        for (topic, partition), offset in removed.items()
        if topic in part.inputs
    ):
        what = f"retention has deleted records that it holds or has not read: {listed(gone)}"
        if not part.expires_removed:
            raise InputGone(
                f"{part.name}: {what}; to go on without them: --set topics.on_removed=expire"
            )
    fold.state, outputs = part.reconcile(part.config, fold.state, removed, time_s)
    move_behind(fold, removed)
    write_entry(
        part, fold, time_s, [], [to_message(output) for output in outputs], commit, removed=removed
    )
    return [f"{what}; it goes on without them (topics.on_removed: expire)"] if what else []


class BatchResult(NamedTuple):
    """What a turn leaves to the loop."""

    metrics: list[Message]  # they stay outside the transaction
    letters: list[DeadLetter]  # what it put aside, in the transaction
    taken: Counter[str]  # records, by topic
    failed: list[Fate]  # of rollouts that their env could not finish


def commit_positions(
    writer: Writer, positions: Offsets, marked: Offsets
) -> dict[TopicPartition, int]:
    """Mark the positions that are not marked yet. Returns those that are marked now."""
    moved = {where: offset for where, offset in positions.items() if marked.get(where) != offset}
    return dict(positions) if writer.commit_offsets(moved, wait=False) else dict(marked)


def drain_available(reader: Reader, messages: list[Message]) -> Iterator[Message]:
    """These messages and those that lie ready behind them, as many as a turn takes; the next are
    fetched when the ones before are folded in.
    """
    left, left_bytes = MAX_POLL_RECORDS, MAX_POLL_BYTES
    while messages:
        yield from messages
        left -= len(messages)
        left_bytes -= sum(len(message.value or b"") for message in messages)
        messages = reader.poll(min(PIECE_MESSAGES, left), 0.0) if left and left_bytes > 0 else []


def process_batch(
    part: Processor[C, S],
    fold: ProcessorState[C, S],
    messages: Iterable[Message],
    time_s: float,
    commit: Callable[[Sequence[Message]], int],
) -> BatchResult:
    """One turn: fold the messages in and commit what comes of it."""
    slices, taken = list[Slice](), Counter[str]()
    fold.state, outputs, metrics = decode_and_step(
        part, part.config, fold.state, record_slices(messages, fold.positions, slices), time_s
    )
    for piece in slices:
        taken[piece.topic] += piece.count
    fold.events_since_snapshot += taken.total()
    due_events = max(part.snapshot_events, fold.snapshot_bytes // SNAPSHOT_EVENT_BYTES)
    write_entry(
        part,
        fold,
        time_s,
        slices,
        outputs,
        commit,
        with_snapshot=fold.events_since_snapshot >= due_events,
    )
    return BatchResult(
        metrics,
        [
            letter
            for message in outputs
            if message.topic.startswith(TOPIC) and (letter := parse_dead_letter(message))
        ],
        taken,
        failures(outputs),
    )


def write_entry(
    part: Processor[C, S],
    fold: ProcessorState[C, S],
    time_s: float,
    slices: list[Slice],
    outputs: Sequence[Message],
    commit: Callable[[Sequence[Message]], int],
    removed: Offsets | None = None,
    with_snapshot: bool = False,
) -> None:
    """Commit the outputs together with the entry that says what they were made of."""
    changed, fold.config = part.config != fold.config, part.config
    fold.sequence += 1
    fold.unsaved_since_s = time_s if fold.unsaved_since_s is None else fold.unsaved_since_s
    saving = snapshot(fold, fold.positions) if with_snapshot else None
    entry = JournalEntry(
        sequence=fold.sequence,
        time_s=time_s,
        slices=slices,
        digest=digest(outputs),
        output_count=len(outputs),
        snapshot_offset=fold.snapshot_offset,
        config=to_json(part.config) if changed else "",
        removed=None
        if removed is None
        else [(topic, partition, offset) for (topic, partition), offset in removed.items()],
    )
    journaled = [entry] if saving is None else [saving, entry]
    offset = commit(
        [
            *outputs,
            *[
                to_message(Output(topology.journal(part.name), part.name, record))
                for record in journaled
            ],
        ]
    )
    if saving is not None:
        # Only now it is known where it lies, right before the entry, which is always smaller than a
        # message. The next entry says so.
        saved(fold, offset - 1, len(saving.state))


def decode_and_step(
    part: Processor[C, S], config: C, state: S, messages: Iterable[Message], time_s: float
) -> tuple[S, list[Message], list[Message]]:
    """`step` over what can be read; what cannot be read is put aside. Returns (state, outputs,
    metrics).
    """
    rejected = list[Output]()

    def readable() -> Iterator[Event]:
        """Each is decoded when its turn comes: what it touches is still in the processor's cache
        then.
        """
        for message in messages:
            event = to_event(message, part.schemas_of(message.topic))
            if isinstance(event.record, Undecodable):
                rejected.extend(to_dead_letter(event, event.record.cause))
            elif event.record is None:
                # inputs of parts are never compacted: a null record means nothing there
                rejected.extend(to_dead_letter(event, "the record is empty"))
            else:
                yield event

    state, outputs = part.step(config, state, readable(), time_s)
    made = [to_message(output) for output in (*rejected, *outputs)]
    return state, [m for m in made if m.topic != METRICS], [m for m in made if m.topic == METRICS]


def snapshot(fold: ProcessorState[Any, Any], positions: Offsets) -> Snapshot:
    """The state after this turn."""
    return Snapshot(
        sequence=fold.sequence,
        positions=[(topic, partition, offset) for (topic, partition), offset in positions.items()],
        state=serialize_state(fold.state),
        config=to_json(fold.config),
    )


def whole_snapshots(
    records: Iterable[tuple[int, Record]],
) -> Iterator[tuple[int, JournalEntry | Snapshot]]:
    """The entries of a journal and its snapshots, with their offsets.

    Earlier versions of streamrl wrote a large snapshot as several records, each with a part of the
    state. These are put together here, with the offset of the first; one that lacks a record is left
    out.
    """
    begins_at, pieces = -1, list[Snapshot]()
    for offset, record in records:
        if isinstance(record, JournalEntry):
            yield offset, record
        elif isinstance(record, Snapshot):
            if record.part == 0:
                begins_at, pieces = offset, []
            pieces.append(record)
            if [piece.part for piece in pieces] == list(range(record.parts)):
                yield (
                    begins_at,
                    msgspec.structs.replace(
                        record, state=b"".join(piece.state for piece in pieces), part=0, parts=1
                    ),
                )


def restore(log: Log, part: Processor[C, S]) -> tuple[ProcessorState[C, S], int]:
    """The part where it was: its last snapshot, the records that holds, and the entries since,
    outputs thrown away. Also the records read.

    A record that the snapshot holds and retention has deleted is an event without a record, for
    `Processor.reconcile`. Raises InputGone where the entries since the snapshot cannot be folded again
    for that reason.
    """
    topic = topology.journal(part.name)
    last, fold, tape = (
        last_record(log, topic, JournalEntry),
        ProcessorState(part.initial()),
        SliceReader(log, part.schemas_of),
    )
    if last is None:
        return fold, 0
    found = list(
        whole_snapshots(
            entries(log, topic, max(last.snapshot_offset, beginning_offset(log, topic, 0)))
        )
    )
    # behind the last entry: the part was idle, or has been told to stop
    behind = isinstance(found[-1][1], Snapshot)
    snapshots = {offset: record for offset, record in found if isinstance(record, Snapshot)}
    base = found[-1][0] if behind else last.snapshot_offset
    folded = snapshots[base].sequence if base in snapshots else -1
    if snapshots and deleted_inputs(
        log,
        [
            entry
            for _, entry in found
            if isinstance(entry, JournalEntry) and entry.sequence > folded
        ],
    ):
        # the last entry does not name it yet; that entry is then not folded again, and its metrics
        # may be lost
        base = max(snapshots)
    if base in snapshots:
        begin_at(fold, part, base, snapshots[base], tape)
    since = [(offset, record) for offset, record in found if record.sequence > fold.sequence]
    if gone := deleted_inputs(
        log, [record for _, record in since if isinstance(record, JournalEntry)]
    ):
        taken = (
            f"retention has deleted records that it took after its last snapshot: {listed(gone)}"
        )
        raise InputGone(
            f"{part.name}: {taken}; go on from a version that was announced: `streamrl fork`"
        )
    # (offset, sequence, bytes) of a snapshot behind the one that is named: its part died before the
    # next entry
    unnamed = -1, -1, 0
    for offset, record in since:
        if isinstance(record, Snapshot):
            unnamed = offset, record.sequence, len(record.state)
            continue
        outputs = replay_entry(part, fold, record, tape)
        if digest(outputs) != record.digest:
            differ = f"{len(outputs)} outputs that differ from the {record.output_count} recorded"
            raise StreamrlError(
                f"{part.name}: entry {record.sequence} gives {differ}; the code has changed since"
            )
        if unnamed[1] == record.sequence:
            saved(fold, unnamed[0], unnamed[2])
    tape.close()
    return fold, tape.records_read


def begin_at(
    fold: ProcessorState[C, S],
    part: Processor[C, S],
    offset: int,
    record: Snapshot,
    tape: SliceReader,
) -> None:
    """Let the fold be where it was at this snapshot, which lies at `offset` of the journal."""
    fold.state = deserialize_state(record.state, type(fold.state), tape.read_records)
    fold.sequence = record.sequence
    fold.config = from_json(record.config, part)
    fold.positions = {(topic, partition): start for topic, partition, start in record.positions}
    saved(fold, offset, len(record.state))


def deleted_inputs(log: Log, since: Sequence[JournalEntry]) -> list[str]:
    """What retention has deleted of the inputs of these entries, partition by partition: asked at
    once, and not found out in the middle of a fold.
    """
    needed: dict[TopicPartition, int] = {}
    for piece in (piece for entry in since for piece in entry.slices):
        needed.setdefault((piece.topic, piece.partition), piece.start)
    begin = first_offsets(log, needed)
    return sorted(
        f"{topic}[{p}] from offset {start}"
        for (topic, p), start in needed.items()
        if is_gone(start, begin[topic, p])
    )


def listed(names: Sequence[str]) -> str:
    """The first few of them, in a line."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def beginning(log: Log, part: Processor[C, S]) -> tuple[ProcessorState[C, S], int, SliceReader]:
    """From where the journal can be folded again to its end: a fold, the offset of the first entry
    behind it, and what reads the inputs.

    It is the first entry; or, where retention has deleted inputs, the first snapshot from which on
    they are all there. Raises InputGone where there is none.
    """
    topic = topology.journal(part.name)
    fold, tape, start = (
        ProcessorState[C, S](part.initial()),
        SliceReader(log, part.schemas_of),
        beginning_offset(log, topic, 0),
    )
    there = log.topics()
    begin = log.beginning_offsets(
        [(name, p) for name, count in there.items() if name in part.inputs for p in range(count)]
    )
    if not any(begin.values()) and not start:
        return fold, 0, tape
    base: tuple[int, Snapshot | None] | None = (start, None) if not start else None
    for offset, record in whole_snapshots(entries(log, topic, start)):
        if isinstance(record, JournalEntry):
            wanted = [(piece.topic, piece.partition, piece.start) for piece in record.slices]
        elif base is None:
            wanted = references(record.state)
            base = offset, record
        else:
            continue
        if any(
            is_gone(at, begin.setdefault((name, p), first_offsets(log, [(name, p)])[name, p]))
            for name, p, at in wanted
        ):
            base = None
    if base is None:
        raise InputGone(
            f"{part.name}: retention has deleted inputs behind every snapshot of its journal; there is nothing to fold again"
        )
    offset, record = base
    if record is not None:
        begin_at(fold, part, offset, record, tape)
    return fold, offset, tape


def replay_entry(
    part: Processor[C, S], fold: ProcessorState[C, S], entry: JournalEntry, tape: SliceReader
) -> list[Message]:
    """Run one entry again. Returns the outputs it gives now, to be compared with those recorded."""
    if entry.sequence != fold.sequence + 1:
        raise StreamrlError(
            f"journal.{part.name} jumps from entry {fold.sequence} to {entry.sequence}; it has been tampered with"
        )
    if entry.config:
        fold.config = from_json(entry.config, part)
    assert fold.config is not None, "the first entry carries the configuration"
    messages = [message for piece in entry.slices for message in tape.read_slice(piece)]
    if entry.removed is None:
        fold.state, outputs, fold.metrics = decode_and_step(
            part, fold.config, fold.state, messages, entry.time_s
        )
    else:
        removed = {(topic, partition): offset for topic, partition, offset in entry.removed}
        fold.state, made = part.reconcile(fold.config, fold.state, removed, entry.time_s)
        outputs = [to_message(output) for output in made]
        move_behind(fold, removed)
    fold.sequence = entry.sequence
    fold.events_since_snapshot += len(messages)
    fold.unsaved_since_s = entry.time_s if fold.unsaved_since_s is None else fold.unsaved_since_s
    fold.positions.update({(piece.topic, piece.partition): piece.end for piece in entry.slices})
    return outputs


def to_json(config: Any) -> str:
    return msgspec.json.encode(config).decode()


def from_json(text: str, part: Processor[C, S]) -> C:
    """The configuration that a journal recorded. Raises StreamrlError where it names code that the
    user's run file does not.
    """
    for name in imports_in(msgspec.json.decode(text)):
        if name not in part.imports:
            never = "nothing is imported because a log names it"
            raise StreamrlError(
                f"journal.{part.name} names {name!r}, the run file does not, and {never}; is it yours? Add it to `imports` there"
            )
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
        self.events, self.turns, self.busy_s = (
            self.events + events,
            self.turns + 1,
            self.busy_s + busy_s,
        )


def gauges(part: Processor[C, S], state: S, tally: Tally, time_s: float) -> dict[str, float]:
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
