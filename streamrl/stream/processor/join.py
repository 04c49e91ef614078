"""How records are joined with the records of other topics that they refer to, as a scored group
refers to its rollouts. A reference is the topic, the partition and the offset of a record. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.stream.log.codec import decode_part, to_event
from streamrl.stream.log.dead_letters import text_of
from streamrl.stream.log.protocol import Event, Message, Undecodable, is_unreadable
from streamrl.stream.records import Record

RecordRef = tuple[str, int, int]  # topic, partition, offset

# Why a record is not joined. Whether its topic has another record there or none depends on when it
# is read, so both have the same words.
NOT_THERE = "a record that it refers to is not in the log any more"


@dataclass(frozen=True)
class Join:
    """How the inputs of a processor are joined with other records. All of it is pure."""

    topics: frozenset[str]  # that the inputs refer to
    schemas: tuple[str, ...]  # of these topics
    part: type[Any]  # the fields of these records that are needed
    # record -> the places of the records that it refers to, of which there may be none
    references: Callable[[Record], Sequence[RecordRef]]
    # (record, parts of those that it refers to) -> the joined record. Raises if they do not fit.
    join: Callable[[Record, Sequence[Any]], Record]


def to_joined_event(message: Message, schemas: tuple[str, ...], join: Join | None) -> Event:
    """The event of a message, whose record is joined with those that came with the message. If
    there are none, because retention has deleted one of them, the record is as it was written.
    """
    event = message.event or to_event(message, schemas)
    record = event.record
    if join is None or not message.joined or not isinstance(record, Record):
        return event
    joined: Record | Undecodable
    try:
        parts = [decode_part(other, join.schemas, join.part) for other in message.joined]
        joined = join.join(record, parts)
    except MemoryError:
        raise  # it is about this process and not about the record
    except ValueError as error:
        joined = Undecodable(str(error), message.value, message.headers)
    except Exception as error:  # a record may refer to anything
        joined = Undecodable(text_of(error), message.value, message.headers)
    return Event(
        topic=event.topic,
        partition=event.partition,
        offset=event.offset,
        key=event.key,
        record=joined,
        value=event.value,
        headers=event.headers,
    )


def lacks_references(message: Message, join: Join | None) -> bool:
    """Whether a message that a `Joiner` has read came without a record that it refers to: retention
    has deleted one, or there is none at its place.
    """
    if join is None or message.event is None:
        return False
    if message.joined:
        return any(is_unreadable(other) for other in message.joined)
    record = message.event.record
    return isinstance(record, Record) and bool(join.references(record))
