"""Records larger than a Kafka message travel as several messages, their chunks. Writers of a log
split them, readers join them; parts see neither.

The chunks of a record go to one partition, in order. Each has two headers of its own before any
other:

    schema           chunk/1
    streamrl.chunk   ID INDEX COUNT, and behind the last one the SHA-256 of the whole value, in ASCII

The last chunk also has the headers of the record. The record lies at the offset of its last chunk.

Whether chunks make a record follows from the partition alone, wherever a reader has begun: from the
first chunk to the last there are at most SPAN_RECORDS offsets and SPAN_BYTES of chunks, of this
record and of others. So a reader never holds more than that. A last chunk that makes no record is
handed on as it is, and becomes a dead letter; other chunks that make none are passed over.
docs/records.md says it for other languages.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.errors import StreamrlError
from streamrl.log.protocol import (
    Log,
    Message,
    Positions,
    Reader,
    TopicPartition,
    beginning_offset,
    read,
)

CHUNK_SCHEMA = ("schema", b"chunk/1")
CHUNK_HEADER = "streamrl.chunk"

# key, headers and value of a message: topics take 8 MiB, Kafka's own framing included
MESSAGE_BYTES = 8 * 1024 * 1024 - 4_096
CHUNK_BYTES = 4_000_000
HEADER_BYTES = 200  # of a chunk's own headers, at most
KEY_BYTES = 1_000_000  # longer keys are cut: no partition and nobody's reading depends on the rest
RECORD_BYTES = 128_000_000  # that a writer takes
SPAN_BYTES = 2 * RECORD_BYTES  # several producers may write to a partition at the same time
SPAN_RECORDS = 100_000

INCOMPLETE = "it is the last chunk of a record whose other chunks are missing, in another order, altered, or too far away"


def size_of(message: Message) -> int:
    return (
        len(message.value or b"")
        + len(message.key or b"")
        + sum(len(name) + len(value) for name, value in message.headers)
    )


def split(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, those that are larger than Kafka takes as chunks. Raises StreamrlError for one
    that no reader would join.
    """
    if max(map(size_of, messages), default=0) <= MESSAGE_BYTES:
        return messages
    return [
        piece
        for message in messages
        for piece in ((message,) if size_of(message) <= MESSAGE_BYTES else _chunks(message))
    ]


def _chunks(message: Message) -> Iterator[Message]:
    if len(message.key or b"") > KEY_BYTES:
        message = message._replace(key=(message.key or b"")[:KEY_BYTES])
    value = message.value or b""
    size = min(CHUNK_BYTES, MESSAGE_BYTES - HEADER_BYTES - size_of(message._replace(value=b"")))
    if size <= 0 or len(value) > RECORD_BYTES:
        raise StreamrlError(
            f"a record of {len(value):,} bytes for {message.topic} cannot be written, at most {RECORD_BYTES:,}; lower max_seq_len or group_size"
        )
    # without a key each would go elsewhere
    partition = message.partition if message.key or message.partition >= 0 else 0
    pieces = [value[start : start + size] for start in range(0, len(value), size)] or [b""]
    name = os.urandom(8).hex()
    for index, piece in enumerate(pieces):
        place, headers = f"{name} {index} {len(pieces)}", message.headers
        if index < len(pieces) - 1:
            headers = ()
        else:
            place += f" {hashlib.sha256(value).hexdigest()}"
        yield message._replace(
            value=piece,
            headers=(CHUNK_SCHEMA, (CHUNK_HEADER, place.encode()), *headers),
            partition=partition,
        )


def is_chunk(message: Message) -> bool:
    return (
        len(message.headers) > 1
        and message.headers[0] == CHUNK_SCHEMA
        and message.headers[1][0] == CHUNK_HEADER
    )


class Place(NamedTuple):
    """What a chunk says of itself."""

    name: bytes
    number: int  # of this chunk, from 0
    total: int  # chunks of the record
    sha256: bytes  # of the whole; empty but in the last chunk

    @property
    def is_last(self) -> bool:
        return self.number == self.total - 1


def place_of(message: Message) -> Place | None:
    """None where the header says nothing that makes sense."""
    name, *rest = message.headers[1][1][:200].split(b" ")
    sha256 = rest.pop() if len(rest) == 3 else b""
    if len(rest) != 2 or not all(number.isdigit() and len(number) < 7 for number in rest):
        return None
    place = Place(name, int(rest[0]), int(rest[1]), sha256)
    return place if 0 <= place.number < place.total and place.is_last == bool(sha256) else None


@dataclass
class _Begun:
    """A record of which the first chunks have come."""

    offset: int  # of its first chunk
    total_bytes: int  # chunks of this partition before it
    count: int
    pieces: list[bytes] = field(default_factory=list[bytes])


@dataclass
class Joiner:
    """Joins the chunks of one partition, fed in order. What is begun is a function of the last
    SPAN_RECORDS offsets.
    """

    # by name, in the order of their first chunks
    begun: dict[bytes, _Begun] = field(default_factory=dict[bytes, _Begun])
    total_bytes: int = 0

    def is_expected(self, place: Place) -> bool:
        record = self.begun.get(place.name)
        return place.number == 0 or (record is not None and place.number == len(record.pieces))

    def add(self, message: Message, place: Place) -> Message | None:
        """The whole record with its last chunk, or that chunk itself where they make none; None
        with all others.
        """
        value = message.value or b""
        self.total_bytes += len(value)
        for name, record in list(self.begun.items()):
            if (
                message.offset - record.offset <= SPAN_RECORDS
                and self.total_bytes - record.total_bytes <= SPAN_BYTES
            ):
                break
            del self.begun[name]
        if place.number == 0:
            self.begun.pop(place.name, None)  # it begins anew, behind all others
            self.begun[place.name] = _Begun(
                message.offset, self.total_bytes - len(value), place.total
            )
        record = self.begun.get(place.name)
        if record is None or (place.number, place.total) != (len(record.pieces), record.count):
            self.begun.pop(place.name, None)
            return message if place.is_last else None
        record.pieces.append(value)
        if not place.is_last:
            return None
        del self.begun[place.name]
        whole = b"".join(record.pieces)
        if hashlib.sha256(whole).hexdigest().encode() != place.sha256:
            return message
        return message._replace(value=whole, headers=message.headers[2:])


class JoiningReader:
    """A reader of whole records over one of messages. One that begins between the chunks of a
    record reads back for those before.
    """

    def __init__(
        self,
        reader: Reader,
        positions: Positions,
        log: Log,
    ) -> None:
        self._reader = reader
        self._log = log
        self._origins = dict(positions)  # what lies from here on has been looked at
        self._positions = dict(positions)
        self._joiners: dict[TopicPartition, Joiner] = {}
        self._cut: dict[TopicPartition, bool] = {}

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """As `Reader.poll`; what has brought chunks only gives nothing, before the time is over."""
        messages = self._reader.poll(max_messages, timeout_s)
        if not any(is_chunk(message) for message in messages):
            return messages
        return [whole for message in messages if (whole := self._whole(message)) is not None]

    def position(self, topic: str, partition: int) -> int:
        return self._reader.position(topic, partition)

    def pause(self, topics: Collection[str]) -> None:
        self._reader.pause(topics)

    def close(self) -> None:
        self._reader.close()

    def _whole(self, message: Message) -> Message | None:
        if not is_chunk(message):
            return message
        place = place_of(message)
        if place is None:
            return message
        where = message.topic, message.partition
        joiner = self._joiners.setdefault(where, Joiner())
        oldest = message.offset - SPAN_RECORDS  # where its record can have begun
        if not joiner.is_expected(place) and oldest < self._origins[where]:
            joiner = self._joiners[where] = self._read_back(message, place)
        if (
            not joiner.is_expected(place)
            and oldest < self._positions[where]
            and self._begins_with_retention(where)
        ):
            # the chunks before it are deleted: the first whole record is the first one here
            return None
        return joiner.add(message, place)

    def _begins_with_retention(self, where: TopicPartition) -> bool:
        """Has this reader begun at the first record that retention has left?"""
        if where not in self._cut:
            self._cut[where] = 0 < self._positions[where] <= beginning_offset(self._log, *where)
        return self._cut[where]

    def _read_back(self, message: Message, place: Place) -> Joiner:
        """What the chunks before this one have begun, from as far back as its first one, or as it
        could be.
        """
        where = message.topic, message.partition
        first, distance, joiner = beginning_offset(self._log, *where), 4 * place.number, Joiner()
        while not joiner.is_expected(place):
            begin = max(first, message.offset - distance, message.offset - SPAN_RECORDS, 0)
            joiner = Joiner()
            for before in read(self._log, *where, begin, message.offset, whole=False):
                if is_chunk(before) and (its_place := place_of(before)) is not None:
                    joiner.add(before, its_place)
            self._origins[where] = min(self._origins[where], begin)
            if begin in (first, 0) or begin == message.offset - SPAN_RECORDS:
                self._origins[where] = min(begin, message.offset - SPAN_RECORDS)
                break
            distance *= 16
        return joiner
