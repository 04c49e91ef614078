"""Records larger than a Kafka message travel as several messages, their chunks. Writers of a log
split them (`split`), and readers join them (`JoiningReader`), so parts see neither.

The chunks of a record go to one partition, in order. Each begins with two headers, whose values are
ASCII:

    schema           chunk/1
    streamrl.chunk   ID INDEX COUNT, and in the last chunk the SHA-256 of the whole value

The last chunk also has the headers of the record, and the offset of the record is that of its last
chunk.

An example: a record of 10,000,000 bytes is written as three chunks of 4,000,000, 4,000,000 and
2,000,000 bytes, at the offsets 70, 72 and 73, because another producer has written a small record
at 71. A reader returns the small record at 71, and the large one at 73. A reader that begins at 73
finds a chunk without the ones before it. It reads back from there, finds 70 and 72, and returns the
same record.

Whether chunks make a record depends on the partition alone, and not on where a reader has begun.
There is one exception: if retention has deleted the first chunk of a record, a reader that begins
at the first message that is left skips the other chunks, the last one included.

From the first chunk to the last there are at most SPAN_RECORDS offsets. All chunks between them,
those of other records too, have at most twice the bytes of the largest record. So a reader never
holds more than that. A last chunk that makes no record is returned as it is, and is dead-lettered.
Other chunks that make none are skipped. docs/records.md describes this for other languages.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from streamrl.config import topology
from streamrl.config.topology import LARGE_RECORD_BYTES, RECORD_BYTES
from streamrl.stream.log.claims import is_claim
from streamrl.stream.log.protocol import (
    Log,
    Message,
    Offsets,
    Reader,
    TopicPartition,
    beginning_offset,
)
from streamrl.stream.log.reading import read
from streamrl.system.errors import StreamrlError

CHUNK_SCHEMA = ("schema", b"chunk/1")
CHUNK_HEADER = "streamrl.chunk"

# The most bytes that key, headers and value of a message may have. Topics take 8 MiB, which
# includes Kafka's framing.
MESSAGE_BYTES = 8 * 1024 * 1024 - 4_096
CHUNK_BYTES = 4_000_000
HEADER_BYTES = 200  # the most bytes of the two headers of a chunk
# Longer keys of messages in chunks are truncated; nothing depends on the rest of them.
KEY_BYTES = 1_000_000
# Their records may have LARGE_RECORD_BYTES. Only the core writes batches and scores, and an env
# writes no journal but its own, which no other part reads.
LARGE_RECORD_TOPICS = (topology.BATCHES, topology.SCORES, topology.JOURNAL)
SPAN_RECORDS = 100_000

INCOMPLETE = (
    "it is the last chunk of a record whose other chunks are missing, in another order, altered, "
    "or too far away"
)


def record_limit(topic: str) -> int:
    """The most bytes that a record of the topic may have."""
    return LARGE_RECORD_BYTES if topology.kind_of(topic) in LARGE_RECORD_TOPICS else RECORD_BYTES


def size_of(message: Message) -> int:
    """Bytes of key, headers and value."""
    return (
        len(message.value or b"")
        + len(message.key or b"")
        + sum(len(name) + len(value) for name, value in message.headers)
    )


def fits_message(message: Message) -> bool:
    """Whether Kafka takes the message as it is, and not in chunks."""
    return size_of(message) <= MESSAGE_BYTES


def split(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, with those that are larger than Kafka takes split into chunks. Raises
    StreamrlError for one that no reader would join.
    """
    if all(map(fits_message, messages)):
        return messages
    pieces: list[Message] = []
    for message in messages:
        if fits_message(message):
            pieces.append(message)
        else:
            pieces += _chunks(message)
    return pieces


def _chunks(message: Message) -> Iterator[Message]:
    """The chunks of a message that is too large. Raises StreamrlError if it is larger than a record
    of its topic may be.
    """
    if len(message.key or b"") > KEY_BYTES:
        message = message._replace(key=(message.key or b"")[:KEY_BYTES])
    value = message.value or b""
    size = min(CHUNK_BYTES, MESSAGE_BYTES - HEADER_BYTES - size_of(message._replace(value=b"")))
    limit = record_limit(message.topic)
    if size <= 0 or len(value) > limit:
        raise StreamrlError(
            f"a record of {len(value):,} bytes for {message.topic} cannot be written, "
            f"at most {limit:,}; lower max_seq_len, group_size or total_token_budget"
        )
    # Without a key Kafka would choose a partition for each chunk.
    partition = message.partition if message.key or message.partition >= 0 else 0
    pieces = [value[start : start + size] for start in range(0, len(value), size)] or [b""]
    record_id = os.urandom(8).hex()
    for index, piece in enumerate(pieces):
        place = f"{record_id} {index} {len(pieces)}"
        headers: tuple[tuple[str, bytes], ...] = ()
        if index == len(pieces) - 1:
            place += f" {hashlib.sha256(value).hexdigest()}"
            headers = message.headers
        yield message._replace(
            value=piece,
            headers=(CHUNK_SCHEMA, (CHUNK_HEADER, place.encode()), *headers),
            partition=partition,
        )


def is_chunk(message: Message) -> bool:
    """Whether the message has the headers of a chunk. They may still be malformed (`chunk_of`)."""
    return (
        len(message.headers) > 1
        and message.headers[0] == CHUNK_SCHEMA
        and message.headers[1][0] == CHUNK_HEADER
    )


@dataclass(frozen=True)
class Chunk:
    """A chunk: its piece of a record, and its place in the record by its headers."""

    message: Message
    record_id: bytes
    index: int  # of this chunk, from 0
    count: int  # chunks of the record
    sha256: str  # of the whole; empty but in the last chunk
    piece: bytes
    headers: tuple[tuple[str, bytes], ...]  # of the record, in the last chunk

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def is_consistent(self) -> bool:
        return 0 <= self.index < self.count and self.is_last == bool(self.sha256)


def chunk_of(message: Message) -> Chunk | None:
    """The message as a chunk. None if it is no chunk, or if its header is malformed."""
    if not is_chunk(message):
        return None
    record_id, *rest = message.headers[1][1][:200].split(b" ")
    sha256 = rest.pop() if len(rest) == 3 else b""
    if len(rest) != 2 or not all(number.isdigit() and len(number) < 7 for number in rest):
        return None
    chunk = Chunk(
        message=message,
        record_id=record_id,
        index=int(rest[0]),
        count=int(rest[1]),
        sha256=sha256.decode("ascii", "replace"),
        piece=message.value or b"",
        headers=message.headers[2:],
    )
    return chunk if chunk.is_consistent else None


@dataclass
class _PartialRecord:
    """A record of which the first chunks have come."""

    offset: int  # of its first chunk
    bytes_before: int  # of the chunks of this partition before it
    count: int  # its chunks
    pieces: list[bytes] = field(default_factory=list[bytes])


@dataclass
class ChunkAssembler:
    """Joins the chunks of one partition, which it is given in order. Its state depends only on the
    last SPAN_RECORDS offsets.
    """

    # by id, in the order of their first chunks
    begun: dict[bytes, _PartialRecord] = field(default_factory=dict[bytes, _PartialRecord])
    total_bytes: int = 0  # of all chunks that were added

    def is_expected(self, chunk: Chunk) -> bool:
        """Whether the chunk is the first one of its record, or the one after those that came."""
        record = self.begun.get(chunk.record_id)
        return chunk.index == 0 or (record is not None and chunk.index == len(record.pieces))

    def add(self, chunk: Chunk) -> Message | None:
        """The whole record if this is its last chunk, or the message of this chunk if the chunks
        make no record. None for all other chunks.
        """
        message = chunk.message
        self.total_bytes += len(chunk.piece)
        self._forget_distant(message)
        if chunk.index == 0:
            self.begun.pop(chunk.record_id, None)  # the record begins again, after all others
            bytes_before = self.total_bytes - len(chunk.piece)
            self.begun[chunk.record_id] = _PartialRecord(message.offset, bytes_before, chunk.count)
        record = self.begun.get(chunk.record_id)
        if record is None or (chunk.index, chunk.count) != (len(record.pieces), record.count):
            self.begun.pop(chunk.record_id, None)
            return message if chunk.is_last else None
        record.pieces.append(chunk.piece)
        if not chunk.is_last:
            return None
        del self.begun[chunk.record_id]
        whole = b"".join(record.pieces)
        if hashlib.sha256(whole).hexdigest() != chunk.sha256:
            return message
        return message._replace(value=whole, headers=chunk.headers)

    def _forget_distant(self, message: Message) -> None:
        """Drop the records that began so far before this message that it cannot belong to them."""
        span_bytes = 2 * record_limit(message.topic)  # several producers may write at the same time
        for record_id, record in list(self.begun.items()):
            span = message.offset - record.offset
            if span <= SPAN_RECORDS and self.total_bytes - record.bytes_before <= span_bytes:
                break
            del self.begun[record_id]


def joined(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages of one partition, from its first one on, with chunks joined to records."""
    assembler = ChunkAssembler()
    for message in messages:
        chunk = chunk_of(message)
        whole = message if chunk is None else assembler.add(chunk)
        if whole is not None:
            yield whole


class JoiningReader:
    """A reader of whole records over a reader of messages. It skips claims (`claims.py`).
    If it begins between the chunks of a record, it reads back to find those before.
    """

    def __init__(self, reader: Reader, offsets: Offsets, log: Log) -> None:
        self._reader = reader
        self._log = log
        self._start_offsets = dict(offsets)
        # Chunks from these offsets on are known to the assembler: they need not be read back.
        self._assembled_from = dict(offsets)
        self._assemblers: dict[TopicPartition, ChunkAssembler] = {}
        self._starts_at_retention: dict[TopicPartition, bool] = {}
        # By record id, the offset of the record's first chunk, if this reader has seen it. No such
        # record was cut off by retention.
        self._first_chunk_offsets: dict[TopicPartition, dict[bytes, int]] = {}

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """As `Reader.poll`. A poll that has found only chunks and claims returns nothing, although
        its time is not over.
        """
        messages = self._reader.poll(max_messages, timeout_s)
        if not any(is_chunk(message) or is_claim(message) for message in messages):
            return messages
        records: list[Message] = []
        for message in messages:
            record = None if is_claim(message) else self._joined(message)
            if record is not None:
                records.append(record)
        return records

    def position(self, topic: str, partition: int) -> int:
        return self._reader.position(topic, partition)

    def set_paused(self, topics: Collection[str]) -> None:
        self._reader.set_paused(topics)

    def seek(self, offsets: Offsets) -> None:
        self._reader.seek(offsets)
        for tp, offset in offsets.items():
            self._start_offsets[tp] = offset
            self._assembled_from[tp] = offset
            self._assemblers.pop(tp, None)
            self._starts_at_retention.pop(tp, None)
            self._first_chunk_offsets.pop(tp, None)

    def close(self) -> None:
        self._reader.close()

    def _joined(self, message: Message) -> Message | None:
        """The message itself if it is no chunk, or the record that it completes. None for a chunk
        that completes none.
        """
        chunk = chunk_of(message)
        if chunk is None:
            return message
        tp = message.topic, message.partition
        assembler = self._assemblers.setdefault(tp, ChunkAssembler())
        oldest = message.offset - SPAN_RECORDS  # the record of this chunk begins here or later
        first_offsets = self._first_chunk_offsets.setdefault(tp, {})
        if chunk.index == 0:
            first_offsets.pop(chunk.record_id, None)
            first_offsets[chunk.record_id] = message.offset
            while first_offsets[earliest := next(iter(first_offsets))] < oldest:
                del first_offsets[earliest]
        if not assembler.is_expected(chunk) and oldest < self._assembled_from[tp]:
            assembler = self._read_back(chunk)
            self._assemblers[tp] = assembler
        if (
            not assembler.is_expected(chunk)
            and oldest < self._start_offsets[tp]
            and chunk.record_id not in first_offsets
            and self._begins_with_retention(tp)
        ):
            # Retention has deleted the first chunk, so this record is skipped.
            return None
        return assembler.add(chunk)

    def _begins_with_retention(self, tp: TopicPartition) -> bool:
        """Whether this reader has begun at the first record that retention has left."""
        if tp not in self._starts_at_retention:
            start = self._start_offsets[tp]
            self._starts_at_retention[tp] = 0 < start <= beginning_offset(self._log, *tp)
        return self._starts_at_retention[tp]

    def _read_back(self, chunk: Chunk) -> ChunkAssembler:
        """An assembler that has been given the chunks before this one, back to the first chunk of
        its record, or as far back as that could be.

        How far back it is, is not known, so the distance grows: 4 offsets for each chunk before
        this one, then 64, and so on. A few reads find a record that is written without a gap.
        """
        message = chunk.message
        tp = message.topic, message.partition
        oldest = max(beginning_offset(self._log, *tp), message.offset - SPAN_RECORDS, 0)
        distance = 4 * chunk.index
        while True:
            begin = max(oldest, message.offset - distance)
            assembler = ChunkAssembler()
            for before in read(self._log, *tp, begin, message.offset, whole=False):
                chunk_before = chunk_of(before)
                if chunk_before is not None:
                    assembler.add(chunk_before)
            self._assembled_from[tp] = min(self._assembled_from[tp], begin)
            if begin == oldest:
                # All that can belong to the record has been read.
                self._assembled_from[tp] = min(begin, message.offset - SPAN_RECORDS)
                return assembler
            if assembler.is_expected(chunk):
                return assembler
            distance *= 16
