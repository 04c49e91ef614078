"""Snapshots: a processor's state as bytes, in its journal and back from it.

A state is a msgspec.Struct of plain values, arrays and `Event`s. An Event is written as a reference
to its record in the input topic: MessagePack extension type 2, [topic, partition, offset]. To read
a state back, those records are read again from the log. 10,000 held rollouts are 184 KB this way
and 70 MB with their payload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Event, Offsets, Output
from streamrl.stream.processor.definition import Commit, Processor, ProcessorState, to_json
from streamrl.stream.processor.join import RecordRef
from streamrl.stream.records import Snapshot
from streamrl.system.errors import TransactionFailed

logger = logging.getLogger(__name__)
S = TypeVar("S")

EVENT = 2  # MessagePack extension type of references

ReadRecords = Callable[[Collection[RecordRef]], Mapping[RecordRef, Event]]


# ---- a state and its bytes -----------------------------------------------------------------------


def serialize_state(state: Any) -> bytes:
    """Bytes of a state. Equal states give equal bytes, so a digest of them tells whether two states
    are the same.
    """
    return msgspec.msgpack.encode(state, enc_hook=_encode_event)


def deserialize_state(data: bytes, state_type: type[S], read_records: ReadRecords) -> S:
    """The state of these bytes. All records that it refers to are read in one go, and then put in
    their places.
    """
    wanted = references(data)
    events = read_records(wanted) if wanted else {}

    def event_at(code: int, body: memoryview) -> Any:
        if code != EVENT:
            raise ValueError(f"extension type {code} in a state")
        return events[_decode_reference(body)]

    return msgspec.msgpack.decode(
        data, type=state_type, ext_hook=event_at, dec_hook=lambda _, value: value
    )


def references(data: bytes) -> set[RecordRef]:
    """The places of the records that a serialized state refers to."""
    wanted = set[RecordRef]()

    def collect(code: int, body: memoryview) -> Any:
        if code == EVENT:
            wanted.add(_decode_reference(body))
        return None

    msgspec.msgpack.decode(data, ext_hook=collect)
    return wanted


def held_events(value: Any) -> Iterator[Event]:
    """Every event in a state, wherever it is held."""
    if isinstance(value, Event):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from held_events(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from held_events(item)
    elif hasattr(value, "__struct_fields__"):
        for name in value.__struct_fields__:
            yield from held_events(getattr(value, name))


def _encode_event(value: Any) -> Any:
    if isinstance(value, Event):
        body = msgspec.msgpack.encode((value.topic, value.partition, value.offset))
        return msgspec.msgpack.Ext(EVENT, body)
    raise NotImplementedError(f"{type(value).__name__} cannot be part of a state")


def _decode_reference(body: memoryview) -> RecordRef:
    return msgspec.msgpack.decode(body, type=RecordRef)


# ---- snapshots in a journal ----------------------------------------------------------------------


def to_snapshot(current: ProcessorState[Any, Any]) -> Snapshot:
    """The state as it is now, and where a processor that starts from it continues to read."""
    return Snapshot(
        sequence=current.sequence,
        positions=[(*tp, offset) for tp, offset in current.offsets.items()],
        state=serialize_state(current.state),
        config=to_json(current.config),
    )


def save_snapshot(
    processor: Processor[Any, Any],
    current: ProcessorState[Any, Any],
    positions: Offsets,
    commit: Commit,
) -> None:
    """Write a snapshot in a separate transaction, between two batches. `positions`: how far its
    inputs have been read.
    """
    current.advance(positions)
    record = to_snapshot(current)
    offset = commit([to_message(Output(processor.journal, processor.name, record))])
    current.set_snapshot(offset, len(record.state))


def save_last_snapshot(
    processor: Processor[Any, Any],
    current: ProcessorState[Any, Any],
    positions: Offsets,
    commit: Commit,
) -> None:
    """Write a snapshot if the log takes one. A processor that is told to stop stops, also if the
    broker has gone before it.
    """
    try:
        save_snapshot(processor, current, positions, commit)
    except TransactionFailed as error:
        logger.warning(
            "%s: stopped without a snapshot, so the next start replays more: %s",
            processor.name,
            error,
        )
