"""Records larger than a Kafka message travel as several messages, their chunks. Writers of a log
split them, readers join them; parts see neither.

The chunks of a record go to one partition, in order. Each has two headers of its own before any
other:

    schema           chunk/1
    streamrl.chunk   ID INDEX COUNT, and behind the last one the SHA-256 of the whole value, in ASCII

The last chunk also has the headers of the record. The record lies at the offset of its last chunk.

Whether chunks make a record follows from the partition alone, wherever a reader has begun: from the
first chunk to the last there are at most SPAN_RECORDS offsets, and twice as many bytes of chunks, of
this record and of others, as the largest record has. So a reader never holds more than that. A last
chunk that makes no record is handed on as it is, and becomes a dead letter; other chunks that make
none are passed over. docs/records.md says it for other languages.

Earlier versions of streamrl cut batches by themselves, into records `batch-part/1`. Readers join
these by the same rules: what they hand on is a batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from streamrl.config import topology
from streamrl.errors import StreamrlError
from streamrl.log.protocol import (
    Log,
    Message,
    Offsets,
    Reader,
    TopicPartition,
    beginning_offset,
    read,
)
from streamrl.records import BatchPart

CHUNK_SCHEMA = ("schema", b"chunk/1")
CHUNK_HEADER = "streamrl.chunk"

# key, headers and value of a message: topics take 8 MiB, Kafka's own framing included
MESSAGE_BYTES = 8 * 1024 * 1024 - 4_096
CHUNK_BYTES = 4_000_000
HEADER_BYTES = 200  # of a chunk's own headers, at most
KEY_BYTES = 1_000_000  # longer keys are cut: no partition and nobody's reading depends on the rest
RECORD_BYTES = 128_000_000  # that a writer takes
OWN_TOPICS = (topology.BATCHES, topology.SCORES, topology.JOURNAL)  # no env writes records there
# The same for these: half a gigabyte is what a transaction takes, and a batch of 40 million tokens
LARGE_RECORD_BYTES = 512_000_000
SPAN_RECORDS = 100_000

INCOMPLETE = "it is the last chunk of a record whose other chunks are missing, in another order, altered, or too far away"

PART_SCHEMA = ("schema", b"batch-part/1")
BATCH_SCHEMA = ("schema", b"batch/1")
_BATCH_PARTS = msgspec.msgpack.Decoder(BatchPart)


def record_limit(topic: str) -> int:
    """Bytes that a record of the topic has at most."""
    return LARGE_RECORD_BYTES if topology.kind_of(topic) in OWN_TOPICS else RECORD_BYTES


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
    limit = record_limit(message.topic)
    if size <= 0 or len(value) > limit:
        raise StreamrlError(
            f"a record of {len(value):,} bytes for {message.topic} cannot be written, at most {limit:,}; lower max_seq_len, group_size or total_token_budget"
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


class Chunk(NamedTuple):
    """What a chunk carries, and what it says of itself."""

    message: Message
    name: bytes  # of its record
    number: int  # of this chunk, from 0
    total: int  # chunks of the record
    sha256: str  # of the whole; empty but in the last chunk
    data: bytes
    headers: tuple[tuple[str, bytes], ...]  # of the record, in the last chunk

    @property
    def is_last(self) -> bool:
        return self.number == self.total - 1

    @property
    def makes_sense(self) -> bool:
        return 0 <= self.number < self.total and self.is_last == bool(self.sha256)


def may_be_chunk(message: Message) -> bool:
    """Does it have the headers of a chunk, or of a part of a batch in an earlier log?"""
    return is_chunk(message) or (
        message.topic == topology.BATCHES and message.headers[:1] == (PART_SCHEMA,)
    )


def chunk_of(message: Message) -> Chunk | None:
    """None where it is none, or says nothing that makes sense."""
    if is_chunk(message):
        chunk = _chunk_by_header(message)
    elif may_be_chunk(message):
        chunk = _chunk_of_batch_part(message)
    else:
        chunk = None
    return chunk if chunk is not None and chunk.makes_sense else None


def _chunk_by_header(message: Message) -> Chunk | None:
    name, *rest = message.headers[1][1][:200].split(b" ")
    sha256 = rest.pop() if len(rest) == 3 else b""
    if len(rest) != 2 or not all(number.isdigit() and len(number) < 7 for number in rest):
        return None
    return Chunk(
        message,
        name,
        int(rest[0]),
        int(rest[1]),
        sha256.decode("ascii", "replace"),
        message.value or b"",
        message.headers[2:],
    )


def _chunk_of_batch_part(message: Message) -> Chunk | None:
    """A BatchPart, which only earlier versions of streamrl have written, as a chunk of its batch."""
    try:
        part = _BATCH_PARTS.decode(message.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    name = b"batch %d" % part.number
    return Chunk(
        message, name, part.part, part.parts, part.digest.hex(), part.data, (BATCH_SCHEMA,)
    )


@dataclass
class _PartialRecord:
    """A record of which the first chunks have come."""

    offset: int  # of its first chunk
    total_bytes: int  # chunks of this partition before it
    count: int
    pieces: list[bytes] = field(default_factory=list[bytes])


@dataclass
class ChunkAssembler:
    """Joins the chunks of one partition, fed in order. What is begun is a function of the last
    SPAN_RECORDS offsets.
    """

    # by name, in the order of their first chunks
    begun: dict[bytes, _PartialRecord] = field(default_factory=dict[bytes, _PartialRecord])
    total_bytes: int = 0

    def is_expected(self, chunk: Chunk) -> bool:
        record = self.begun.get(chunk.name)
        return chunk.number == 0 or (record is not None and chunk.number == len(record.pieces))

    def add(self, chunk: Chunk) -> Message | None:
        """The whole record with its last chunk, or that chunk itself where they make none; None
        with all others.
        """
        message = chunk.message
        self.total_bytes += len(chunk.data)
        self._forget_distant(message)
        if chunk.number == 0:
            self.begun.pop(chunk.name, None)  # it begins anew, behind all others
            self.begun[chunk.name] = _PartialRecord(
                message.offset, self.total_bytes - len(chunk.data), chunk.total
            )
        record = self.begun.get(chunk.name)
        if record is None or (chunk.number, chunk.total) != (len(record.pieces), record.count):
            self.begun.pop(chunk.name, None)
            return message if chunk.is_last else None
        record.pieces.append(chunk.data)
        if not chunk.is_last:
            return None
        del self.begun[chunk.name]
        whole = b"".join(record.pieces)
        if hashlib.sha256(whole).hexdigest() != chunk.sha256:
            return message
        return message._replace(value=whole, headers=chunk.headers)

    def _forget_distant(self, message: Message) -> None:
        """Drop the records that began so far before this message that it cannot be theirs."""
        span_bytes = 2 * record_limit(message.topic)  # several producers may write at the same time
        for name, record in list(self.begun.items()):
            if (
                message.offset - record.offset <= SPAN_RECORDS
                and self.total_bytes - record.total_bytes <= span_bytes
            ):
                break
            del self.begun[name]


def joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages of one partition, in order and from its first one on, as whole records."""
    assembler = ChunkAssembler()
    for message in messages:
        chunk = chunk_of(message)
        whole = message if chunk is None else assembler.add(chunk)
        if whole is not None:
            yield whole


class JoiningReader:
    """A reader of whole records over one of messages. One that begins between the chunks of a
    record reads back for those before.
    """

    def __init__(
        self,
        reader: Reader,
        offsets: Offsets,
        log: Log,
    ) -> None:
        self._reader = reader
        self._log = log
        self._origins = dict(offsets)  # what lies from here on has been looked at
        self._positions = dict(offsets)
        self._assemblers: dict[TopicPartition, ChunkAssembler] = {}
        self._cut: dict[TopicPartition, bool] = {}

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """As `Reader.poll`; what has brought chunks only gives nothing, before the time is over."""
        messages = self._reader.poll(max_messages, timeout_s)
        if not any(may_be_chunk(message) for message in messages):
            return messages
        return [whole for message in messages if (whole := self._whole(message)) is not None]

    def position(self, topic: str, partition: int) -> int:
        return self._reader.position(topic, partition)

    def set_paused(self, topics: Collection[str]) -> None:
        self._reader.set_paused(topics)

    def close(self) -> None:
        self._reader.close()

    def _whole(self, message: Message) -> Message | None:
        chunk = chunk_of(message)
        if chunk is None:
            return message
        where = message.topic, message.partition
        assembler = self._assemblers.setdefault(where, ChunkAssembler())
        oldest = message.offset - SPAN_RECORDS  # where its record can have begun
        if not assembler.is_expected(chunk) and oldest < self._origins[where]:
            assembler = self._assemblers[where] = self._read_back(chunk)
        if (
            not assembler.is_expected(chunk)
            and oldest < self._positions[where]
            and self._begins_with_retention(where)
        ):
            # the chunks before it are deleted: the first whole record is the first one here
            return None
        return assembler.add(chunk)

    def _begins_with_retention(self, where: TopicPartition) -> bool:
        """Has this reader begun at the first record that retention has left?"""
        if where not in self._cut:
            self._cut[where] = 0 < self._positions[where] <= beginning_offset(self._log, *where)
        return self._cut[where]

    def _read_back(self, chunk: Chunk) -> ChunkAssembler:
        """What the chunks before this one have begun, from as far back as its first one, or as it
        could be.
        """
        message = chunk.message
        where = message.topic, message.partition
        first = beginning_offset(self._log, *where)
        distance = 4 * chunk.number
        assembler = ChunkAssembler()
        while not assembler.is_expected(chunk):
            begin = max(first, message.offset - distance, message.offset - SPAN_RECORDS, 0)
            assembler = ChunkAssembler()
            for before in read(self._log, *where, begin, message.offset, whole=False):
                if (its_chunk := chunk_of(before)) is not None:
                    assembler.add(its_chunk)
            self._origins[where] = min(self._origins[where], begin)
            if begin in (first, 0) or begin == message.offset - SPAN_RECORDS:
                self._origins[where] = min(begin, message.offset - SPAN_RECORDS)
                break
            distance *= 16
        return assembler
