"""Records larger than a message: split by every writer, joined by every reader, wherever it begins;
invalid chunks take bounded memory.
"""

from __future__ import annotations

import random

import pytest

from streamrl.stream.log import chunks
from streamrl.stream.log.chunks import CHUNK_HEADER, CHUNK_SCHEMA, is_chunk, split
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.dead_letters import parse_dead_letter, to_dead_letter
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Message, Undecodable
from streamrl.stream.log.reading import read
from streamrl.system.errors import StreamrlError

SCHEMA = ("schema", b"x/1")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MESSAGE_BYTES", 2_000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    monkeypatch.setattr(chunks, "RECORD_BYTES", 10_000)
    monkeypatch.setattr(chunks, "LARGE_RECORD_BYTES", 20_000)


def large(letter: str, size: int = 2_005, topic: str = "in") -> Message:
    return Message(
        topic, letter.encode(), letter.encode() * size, (SCHEMA, ("trace", b"1"), ("trace", b"2"))
    )


def pieces(letter: str, size: int = 25) -> list[Message]:
    """The chunks of a record: 3 of 10, 10 and 5 bytes."""
    return list(chunks._chunks(large(letter, size)))


def log_of(*messages: Message) -> MemoryLog:
    log = MemoryLog({"in": 1})
    log.writer("a").commit(messages)
    return log


def found(log: Log, start: int = 0, end: int | None = None) -> list[tuple[int, bytes]]:
    return [
        (m.offset, (m.key or b"?") + b"%d" % len(m.value or b""))
        for m in read(log, "in", 0, start, end)
    ]


def test_a_small_record_is_left_alone_and_a_large_one_comes_back_as_it_was():
    small = Message("in", b"k", b"v")
    assert split([small]) == [small]
    there = split([small, large("a")])
    assert len(there) == 1 + 201 and all(len(m.value or b"") <= 10 for m in there)
    log = log_of(small, large("a"), Message("in", b"k", b"w"))
    first, whole, last = read(log, "in", 0, 0)
    assert (first.value, last.value, last.offset) == (b"v", b"w", 202)
    assert whole._replace(offset=-1, partition=-1, timestamp_s=0.0) == large("a")
    assert whole.offset == 201, "it lies where its last chunk does"


@pytest.mark.parametrize("start", range(8))
def test_a_reader_that_begins_between_chunks_finds_what_the_others_find(start: int):
    a = pieces("a")
    b = pieces("b")
    log = log_of(a[0], b[0], a[1], Message("in", b"k", b"v"), b[1], a[2], b[2])
    assert found(log) == [(3, b"k1"), (5, b"a25"), (6, b"b25")]
    assert found(log, start) == [one for one in found(log) if one[0] >= start]
    assert found(log, 5, 6) == [(5, b"a25")]


def broken() -> dict[str, list[Message]]:
    a = pieces("a")
    b = pieces("b")
    head = (CHUNK_SCHEMA, (CHUNK_HEADER, b"a 0 2 3 4 5"))
    return {
        "the first is missing": a[1:],
        "one is missing": [a[0], a[2]],
        "out of order": [a[1], a[0], a[2]],
        "one is there twice": [a[0], a[1], a[1], a[2]],
        "altered": [a[0], a[1], a[2]._replace(value=b"other")],
        "of another record": [a[0], b[1], a[2]],
        "makes no sense": [Message("in", b"a", b"x", head)],
        "no number": [Message("in", b"a", b"x", (CHUNK_SCHEMA, (CHUNK_HEADER, b"a x 2")))],
        "empty": [Message("in", b"a", None, (CHUNK_SCHEMA, (CHUNK_HEADER, b"")))],
    }


BROKEN = (
    "the first is missing",
    "one is missing",
    "out of order",
    "one is there twice",
    "altered",
    "of another record",
    "makes no sense",
    "no number",
    "empty",
)


@pytest.mark.parametrize("what", BROKEN)
def test_a_last_chunk_that_makes_no_record_becomes_a_dead_letter_that_is_no_chunk(what: str):
    log = log_of(*broken()[what])
    (message,) = read(log, "in", 0, 0)
    assert is_chunk(message) and [message] == list(read(log, "in", 0, message.offset)), (
        "wherever one begins"
    )
    event = to_event(message, ("x", "rollout"))
    if message.value is None:
        return
    assert isinstance(event.record, Undecodable) and "last chunk of a record" in event.record.cause
    letter = parse_dead_letter(to_message(to_dead_letter(event, event.record.cause)[0]))
    assert (
        letter is not None
        and not is_chunk(letter.message)
        and not letter.is_whole
        and "last chunk" in letter.cause
    )


def test_chunks_without_end_take_bounded_memory_and_what_is_too_far_apart_is_no_record(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(chunks, "RECORD_BYTES", 50)  # so all chunks of a record lie within 100
    assembler = chunks.ChunkAssembler()
    for offset in range(1_000):
        chunk = chunks.chunk_of(pieces("a")[0]._replace(offset=offset))
        assert chunk is not None and assembler.add(chunk) is None
        held = [piece for record in assembler.begun.values() for piece in record.pieces]
        assert sum(map(len, held)) <= 100
    a = pieces("a")
    others = [piece for letter in "bcde" for piece in pieces(letter)]
    assert [size for _, size in found(log_of(*a[:2], *others[:10], a[2]))][-1] == b"a5", (
        "85 bytes between: with its own 110"
    )
    assert [size for _, size in found(log_of(*a[:2], *others[:6], a[2]))][-1] == b"a25"
    monkeypatch.setattr(chunks, "SPAN_RECORDS", 20)
    between = [Message("in", b"k", b"v")] * 30
    log = log_of(*a[:2], *between, a[2])
    assert found(log)[-1] == found(log, 31)[-1] == (32, b"a5")


def test_what_random_producers_write_is_read_alike_from_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "RECORD_BYTES", 60)
    monkeypatch.setattr(chunks, "SPAN_RECORDS", 30)
    choose = random.Random(7)
    streams = [
        [
            piece
            for _ in range(8)
            for piece in (pieces(letter) if choose.random() < 0.8 else pieces(letter)[1:])
        ]
        for letter in "abcd"
    ]
    written = [Message("in", b"k", b"v")]
    while streams := [stream for stream in streams if stream]:
        written.append(choose.choice(streams).pop(0))
    log = log_of(*written)
    everything = found(log)
    assert {size for _, size in everything} > {b"a25", b"b5"}
    for start in range(len(written)):
        assert found(log, start) == [one for one in everything if one[0] >= start]


def test_a_record_whose_first_chunks_retention_has_deleted_is_passed_over():
    a = pieces("a")
    log = log_of(*a, Message("in", b"k", b"v"), *pieces("b"))
    log.delete_before({("in", 0): 1})
    assert found(log, 1) == [(3, b"k1"), (6, b"b25")]


def test_what_no_reader_would_join_is_refused_and_a_key_that_fits_in_no_message_is_cut():
    with pytest.raises(
        StreamrlError, match="10,001 bytes for in cannot be written, at most 10,000"
    ):
        split([large("a", 10_001)])
    whole = large("a", 20_000, topic="journal.buffer")
    assert len(split([whole])) == 2_000, "those of the run's own parts may be larger"
    with pytest.raises(StreamrlError, match="20,001 bytes for batches cannot be written"):
        split([large("a", 20_001, topic="batches")])
    (message,) = split([Message("in", b"k" * 1_990, b"v")])
    assert message.key == b"k" * 1_990


def test_a_key_that_fits_in_no_message_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "KEY_BYTES", 100)
    log = log_of(Message("in", b"k" * 5_000, b"v" * 20))
    (message,) = read(log, "in", 0, 0)
    assert (message.key, message.value) == (b"k" * 100, b"v" * 20)


@pytest.mark.parametrize("deleted", [0, 2])
def test_a_chunk_that_was_written_twice_spoils_its_record_wherever_a_reader_begins(deleted: int):
    """Two small records come before it, of which retention deletes both or none."""
    chunks_of_a = pieces("a")
    log = log_of(*[Message("in", b"k", b"x")] * 2, *chunks_of_a[:2], *chunks_of_a[1:])
    last = 2 + len(chunks_of_a)
    log.delete_before({("in", 0): deleted})
    (message,) = (m for m in read(log, "in", 0, 2))
    assert message.offset == last and is_chunk(message)
