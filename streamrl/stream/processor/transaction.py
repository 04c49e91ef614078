"""One batch of records is one transaction: its outputs, and the journal entry that names its
inputs, are committed together or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from streamrl.stream.log.codec import digest, to_message
from streamrl.stream.log.dead_letters import DeadLetter, parse_dead_letter, to_dead_letter
from streamrl.stream.log.meter import METRICS
from streamrl.stream.log.protocol import Event, Message, Offsets, Output, Undecodable
from streamrl.stream.processor.definition import (
    SNAPSHOT_EVENT_BYTES,
    Commit,
    Processor,
    ProcessorState,
    to_json,
)
from streamrl.stream.processor.join import lacks_references, to_joined_event
from streamrl.stream.processor.journal import record_slices
from streamrl.stream.processor.snapshots import to_snapshot
from streamrl.stream.records import Fate, JournalEntry, Slice, Snapshot

S = TypeVar("S")
C = TypeVar("C")


class StepResult(NamedTuple, Generic[S]):
    """What a step over some messages gives."""

    state: S
    outputs: list[Message]  # of the transaction
    metrics: list[Message]
    letters: list[DeadLetter]  # the dead letters among the outputs
    failed: list[Fate]  # the fates of failed rollouts among the outputs


class BatchResult(NamedTuple):
    """What is left to do for the loop once a batch is committed."""

    metrics: list[Message]  # to be sent outside the transaction
    letters: list[DeadLetter]  # the dead letters in the transaction
    # Those of records of the batch. The others are of records that were held until now, perhaps
    # since an earlier process.
    invalid: list[DeadLetter]
    taken: Counter[str]  # records, by topic
    failed: list[Fate]  # the fates of rollouts that their env could not finish


def process_batch(
    processor: Processor[C, S],
    current: ProcessorState[C, S],
    messages: Iterable[Message],
    time_s: float,
    commit: Commit,
    positions: Callable[[], Offsets] = dict,
    is_behind: bool = False,
) -> BatchResult:
    """Step over these messages, and commit the outputs with their journal entry.

    `positions` tells how far the inputs have been read once the messages are taken. `is_behind`:
    whether records that were in the log when the processor started are unread.
    """
    slices = list[Slice]()
    unjoined = list[Message]()

    def noted() -> Iterator[Message]:
        for message in record_slices(messages, current.offsets, slices):
            if lacks_references(message, processor.join):
                unjoined.append(message)
            yield message

    result = decode_and_step(processor, processor.config, current.state, noted(), time_s, is_behind)
    current.state = result.state
    taken = Counter[str]()
    for piece in slices:
        taken[piece.topic] += piece.count
    current.events_since_snapshot += taken.total()
    due_events = max(processor.snapshot_events, current.snapshot_bytes // SNAPSHOT_EVENT_BYTES)
    # An entry of which something is deleted is not replayed, so the next start begins after it.
    is_snapshot_due = current.events_since_snapshot >= due_events or bool(unjoined)
    write_entry(
        processor,
        current,
        time_s,
        slices,
        result.outputs,
        commit,
        snapshot_at=positions() if is_snapshot_due else None,
        is_behind=is_behind,
    )
    invalid = [letter for letter in result.letters if is_in(letter, slices)]
    return BatchResult(result.metrics, result.letters, invalid, taken, result.failed)


def is_in(letter: DeadLetter, slices: Iterable[Slice]) -> bool:
    """Whether the record of this dead letter is in one of these slices."""
    return any(
        (piece.topic, piece.partition) == (letter.topic, letter.partition)
        and piece.start <= letter.offset < piece.end
        for piece in slices
    )


def decode_and_step(
    processor: Processor[C, S],
    config: C,
    state: S,
    messages: Iterable[Message],
    time_s: float,
    is_behind: bool = False,
) -> StepResult[S]:
    """Step over the records that can be read, and dead-letter the others."""
    rejected = list[Output]()
    clock = processor.clock(state)
    if clock is not None:
        clock.is_behind = is_behind

    def readable() -> Iterator[Event]:
        # A message is decoded when the step asks for it, while it is still in the CPU's cache.
        for message in messages:
            event = to_joined_event(message, processor.schemas_of(message.topic), processor.join)
            if isinstance(event.record, Undecodable):
                rejected.extend(to_dead_letter(event, event.record.cause))
            elif event.record is None:
                # The inputs of processors are never compacted, so a null record has no meaning.
                rejected.extend(to_dead_letter(event, "the record is empty"))
            else:
                yield event

    state, stepped = processor.step(config, state, readable(), time_s)
    result = StepResult[S](state, [], [], [], [])
    for output in (*rejected, *stepped):
        message = to_message(output)
        destination = result.metrics if output.topic == METRICS else result.outputs
        destination.append(message)
        if isinstance(output.record, Undecodable):
            letter = parse_dead_letter(message)
            if letter is not None:
                result.letters.append(letter)
        elif isinstance(output.record, Fate) and output.record.fate == "failed":
            result.failed.append(output.record)
    return result


def write_entry(
    processor: Processor[C, S],
    current: ProcessorState[C, S],
    time_s: float,
    slices: list[Slice],
    outputs: Sequence[Message],
    commit: Commit,
    removed: Offsets | None = None,
    snapshot_at: Offsets | None = None,
    is_behind: bool = False,
) -> None:
    """Commit the outputs together with the entry that records their inputs. If `snapshot_at`
    is given, a snapshot goes with them, and these are the positions in the inputs.
    """
    config_changed = processor.config != current.config
    current.config = processor.config
    current.add_entry(time_s)
    snapshot: Snapshot | None = None
    if snapshot_at is not None:
        current.advance(snapshot_at)
        snapshot = to_snapshot(current)
    entry = JournalEntry(
        sequence=current.sequence,
        time_s=time_s,
        slices=slices,
        digest=digest(outputs),
        output_count=len(outputs),
        snapshot_offset=current.snapshot_offset,
        config=to_json(processor.config) if config_changed else "",
        removed=None if removed is None else [(*tp, offset) for tp, offset in removed.items()],
        is_behind=is_behind,
    )
    records = [entry] if snapshot is None else [snapshot, entry]
    journaled = [
        to_message(Output(processor.journal, processor.name, record)) for record in records
    ]
    offset = commit([*outputs, *journaled])
    if snapshot is not None:
        # The snapshot is right before the entry, which is never larger than a message. Its
        # offset is known after the commit, so the next entry is the first to name it.
        current.set_snapshot(offset - 1, len(snapshot.state))
