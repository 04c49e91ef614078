"""Restore a processor from its journal: the last snapshot, and the entries since.

An entry is replayed by the same step over the same records, and its outputs are thrown away. They
must be those that were committed: each entry has a digest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from streamrl.stream.log.codec import digest, to_message
from streamrl.stream.log.protocol import Log, Message, Offsets, beginning_offset
from streamrl.stream.processor.definition import Processor, ProcessorState, from_json
from streamrl.stream.processor.joiner import joiner_of
from streamrl.stream.processor.journal import SliceReader, entries, last_record
from streamrl.stream.processor.retention import (
    deleted_inputs,
    first_joinable,
    first_offsets,
    is_gone,
    listed,
)
from streamrl.stream.processor.snapshots import deserialize_state, references
from streamrl.stream.processor.transaction import decode_and_step
from streamrl.stream.records import JournalEntry, Snapshot
from streamrl.system.errors import InputGone, StreamrlError

S = TypeVar("S")
C = TypeVar("C")


def restore(log: Log, processor: Processor[C, S]) -> tuple[ProcessorState[C, S], int]:
    """The processor as it was after its last entry, and how many records were read for it.

    A record that the snapshot holds and retention has deleted becomes an event without a record,
    for `Processor.reconcile`. Raises InputGone if the entries since the snapshot cannot be replayed
    for that reason.
    """
    current = ProcessorState[C, S](processor.initial())
    last = last_record(log, processor.journal, JournalEntry)
    if last is None:
        return current, 0
    reader = SliceReader(log, processor.schemas_of, joiner_of(log, processor))
    begin = beginning_offset(log, processor.journal, 0)
    records = list(state_records(log, processor.journal, max(last.snapshot_offset, begin)))
    base = choose_snapshot(log, processor, records, last.snapshot_offset)
    if base is not None:
        load_snapshot(processor, current, *base, reader)
    since = [(offset, record) for offset, record in records if record.sequence > current.sequence]
    check_inputs(log, processor, [record for _, record in since])
    reader.read_ahead(record for _, record in since if isinstance(record, JournalEntry))
    # A snapshot is committed right before the entry of the same sequence number. If the processor
    # died after that entry, no later one names the snapshot.
    snapshot: tuple[int, Snapshot] | None = None
    for offset, record in since:
        if isinstance(record, Snapshot):
            snapshot = offset, record
            continue
        outputs = replay_entry(processor, current, record, reader)
        check_digest(processor, record, outputs)
        if snapshot is not None and snapshot[1].sequence == record.sequence:
            current.set_snapshot(snapshot[0], len(snapshot[1].state))
    reader.close()
    return current, reader.records_read


def state_records(
    log: Log, journal: str, start: int
) -> Iterator[tuple[int, JournalEntry | Snapshot]]:
    """The entries and snapshots of a journal from offset `start` on, each with its offset."""
    for offset, record in entries(log, journal, start):
        if isinstance(record, JournalEntry | Snapshot):
            yield offset, record


def choose_snapshot(
    log: Log,
    processor: Processor[Any, Any],
    records: Sequence[tuple[int, JournalEntry | Snapshot]],
    named: int,
) -> tuple[int, Snapshot] | None:
    """The snapshot to start from, with its offset: the one at offset `named`, which the last entry
    names, or a newer one. None if there is none.
    """
    snapshots = [(offset, record) for offset, record in records if isinstance(record, Snapshot)]
    if not snapshots:
        return None
    newest = snapshots[-1]
    if records[-1][0] == newest[0]:
        # No entry follows: the processor was idle, or has been told to stop.
        return newest
    base = dict(snapshots).get(named)
    replayed_to = -1 if base is None else base.sequence
    since = [
        record
        for _, record in records
        if isinstance(record, JournalEntry) and record.sequence > replayed_to
    ]
    if deleted_inputs(log, processor, since):
        # The entry that was committed with the newest snapshot is then not replayed, and the
        # metrics that it made may be lost.
        return newest
    return None if base is None else (named, base)


def load_snapshot(
    processor: Processor[C, S],
    current: ProcessorState[C, S],
    offset: int,
    record: Snapshot,
    reader: SliceReader,
) -> None:
    """Bring the processor to this snapshot, which is at `offset` of its journal."""
    current.state = deserialize_state(record.state, type(current.state), reader.read_records)
    current.sequence = record.sequence
    current.config = from_json(record.config, processor)
    current.offsets = {(topic, partition): next_ for topic, partition, next_ in record.positions}
    current.set_snapshot(offset, len(record.state))


def replay_entry(
    processor: Processor[C, S],
    current: ProcessorState[C, S],
    entry: JournalEntry,
    reader: SliceReader,
) -> list[Message]:
    """Make the step of one entry again. Returns the outputs that it gives now."""
    if entry.sequence != current.sequence + 1:
        raise StreamrlError(
            f"{processor.journal} jumps from entry {current.sequence} to {entry.sequence}; "
            "it has been tampered with"
        )
    if entry.config:
        current.config = from_json(entry.config, processor)
    assert current.config is not None, "the first entry carries the configuration"
    messages = [message for piece in entry.slices for message in reader.read_slice(piece)]
    if entry.removed is None:
        result = decode_and_step(
            processor, current.config, current.state, messages, entry.time_s, entry.is_behind
        )
        current.state = result.state
        current.metrics = result.metrics
        outputs = result.outputs
    else:
        removed = {(topic, partition): offset for topic, partition, offset in entry.removed}
        current.state, reconciled = processor.reconcile(
            current.config, current.state, removed, entry.time_s
        )
        outputs = [to_message(output) for output in reconciled]
        current.skip_removed(removed)
    current.add_entry(entry.time_s)
    current.events_since_snapshot += len(messages)
    current.offsets |= {(piece.topic, piece.partition): piece.end for piece in entry.slices}
    return outputs


def check_inputs(
    log: Log, processor: Processor[C, S], since: Sequence[JournalEntry | Snapshot]
) -> None:
    """Raises InputGone if retention has deleted inputs of these entries."""
    entries_since = [record for record in since if isinstance(record, JournalEntry)]
    gone = deleted_inputs(log, processor, entries_since)
    if gone:
        raise InputGone(
            f"{processor.name}: retention has deleted records that it took after its last "
            f"snapshot: {listed(gone)}; continue from an announced version: `streamrl fork`"
        )


def check_digest(
    processor: Processor[C, S], entry: JournalEntry, outputs: Sequence[Message]
) -> None:
    """Raises StreamrlError if these are not the outputs that were committed with the entry."""
    if digest(outputs) != entry.digest:
        raise StreamrlError(
            f"{processor.name}: entry {entry.sequence} gives {len(outputs)} outputs that differ "
            f"from the {entry.output_count} recorded; the code has changed since"
        )


def restore_earliest(
    log: Log, processor: Processor[C, S]
) -> tuple[ProcessorState[C, S], int, SliceReader]:
    """The processor where a replay of its journal to the end can begin; the offset in the journal
    from which to replay; and what reads the inputs.

    That is before the first entry. If retention has deleted inputs, it is the first snapshot from
    which on all inputs are there. Raises InputGone if there is none.
    """
    current = ProcessorState[C, S](processor.initial())
    reader = SliceReader(log, processor.schemas_of, joiner_of(log, processor))
    start = beginning_offset(log, processor.journal, 0)
    begin = log.beginning_offsets(processor.existing_partitions(log))
    begin |= first_joinable(log, processor, begin, begin, log.end_offsets(begin))
    if start == 0 and not any(begin.values()):
        return current, 0, reader
    base = _earliest_snapshot(log, processor, start, begin)
    if base is None:
        return current, 0, reader
    load_snapshot(processor, current, *base, reader)
    return current, base[0], reader


def _earliest_snapshot(
    log: Log, processor: Processor[Any, Any], start: int, begin: Offsets
) -> tuple[int, Snapshot] | None:
    """The first snapshot from which on all inputs are there, with its offset. None if all are there
    from the first entry on. Raises InputGone if there is no such snapshot.

    `start` is the first offset of the journal, and `begin` has those of the inputs.
    """
    first_left = dict(begin)

    def is_any_gone(places: Iterable[tuple[str, int, int]]) -> bool:
        wanted = [((topic, partition), offset) for topic, partition, offset in places]
        unknown = {tp for tp, _ in wanted if tp not in first_left}
        if unknown:
            first_left.update(first_offsets(log, unknown))
        return any(is_gone(offset, first_left[tp]) for tp, offset in wanted)

    is_whole = start == 0
    base: tuple[int, Snapshot] | None = None
    for offset, record in state_records(log, processor.journal, start):
        if isinstance(record, JournalEntry):
            if is_any_gone((piece.topic, piece.partition, piece.start) for piece in record.slices):
                is_whole = False
                base = None
        elif not is_whole and base is None and not is_any_gone(references(record.state)):
            base = offset, record
    if not is_whole and base is None:
        raise InputGone(
            f"{processor.name}: retention has deleted inputs after every snapshot of its "
            "journal; there is nothing to replay"
        )
    return base
