"""Reads the dead letters of a run from `dead-letters.<topic>`. Only `retry` writes: it requeues
records to the topics that they come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from streamrl.config import topology
from streamrl.stream.log.codec import ARRAY, unpack_array
from streamrl.stream.log.dead_letters import (
    TOPIC_PREFIX,
    DeadLetter,
    parse_dead_letter,
    requeue,
    requeued_offset,
)
from streamrl.stream.log.protocol import Log, Message
from streamrl.stream.log.reading import split_by_size
from streamrl.stream.log.records_of import messages_of
from streamrl.system.errors import ConfigError

IDENTITY = "dead-letters"  # the transactional id of `retry`, so that only one runs at a time
CHUNK_LETTERS = 500  # the letters that one transaction requeues, at most
CHUNK_BYTES = 4_000_000  # a transaction is complete when its letters have so many bytes
VALUE_CHARS = 100  # the characters of a field that are shown
_PLACE = re.compile(r"(.+)\[(\d+)\]@(\d+)")
_VARIABLE_PART = re.compile(
    r"""(?<!\w)'[^']*'(?!\w)|(?<!\w)"[^"]*"(?!\w)|(?<![\w<])\d+(\.\d+)?(?!\w)"""
)


@dataclass
class CauseSummary:
    """The letters of one topic whose causes follow one pattern."""

    letters: int
    requeued: int  # the letters of them that were requeued
    first: DeadLetter
    last: DeadLetter


def topics(log: Log) -> list[str]:
    """The topics that have a topic for their dead letters."""
    return sorted(
        topic.removeprefix(TOPIC_PREFIX) for topic in log.topics() if topic.startswith(TOPIC_PREFIX)
    )


def messages(log: Log, topic: str) -> Iterator[Message]:
    """The letters of a topic and their requeue markers, up to the topic's current end."""
    return messages_of(log, topology.dead_letters(topic))


def letters(log: Log, topic: str) -> Iterator[DeadLetter]:
    """The letters of a topic, up to its current end."""
    for message in messages(log, topic):
        letter = parse_dead_letter(message)
        if letter is not None:
            yield letter


def requeued_letters(log: Log, topic: str) -> set[tuple[int, int]]:
    """The (partition, offset) of each letter that was requeued."""
    requeued = ((message.partition, requeued_offset(message)) for message in messages(log, topic))
    return {(partition, offset) for partition, offset in requeued if offset is not None}


_TERMS = {
    r"Expected `numpy\.ndarray`, got `(\w+)`": (
        rf"expected an array (extension type {ARRAY}), got \1"
    ),
    r"Expected `(\w+)`, got `(\w+)`": r"expected \1, got \2",
    r"Object missing required field `(\w+)`": r"the field \1 is missing",
    r" - at `\$\.?([^`]*)`": r", at \1",
}
"""Messages of the Python decoder -> words for a reader who uses another language.

The causes in the log are not changed, because a replay compares them.
"""


def readable_cause(cause: str) -> str:
    """The cause of a letter in words that do not depend on Python."""
    for pattern, words in _TERMS.items():
        cause = re.sub(pattern, words, cause)
    return cause


def cause_pattern(cause: str) -> str:
    """The cause without its quotations and numbers, which differ from record to record."""
    return _VARIABLE_PART.sub("…", cause)


def summarize_causes(log: Log) -> dict[tuple[str, str], CauseSummary]:
    """(topic, pattern of the cause) -> summary, in the order of the first letters."""
    summaries: dict[tuple[str, str], CauseSummary] = {}
    for topic in topics(log):
        done = requeued_letters(log, topic)
        for letter in letters(log, topic):
            key = (topic, cause_pattern(letter.cause))
            summary = summaries.setdefault(key, CauseSummary(0, 0, letter, letter))
            summary.letters += 1
            summary.last = letter
            if (letter.message.partition, letter.message.offset) in done:
                summary.requeued += 1
    return summaries


def find(log: Log, place: str) -> DeadLetter:
    """The letter of the record that was at `place`, written as `rollouts.copy[0]@17`.

    It is the first one if two parts have put the record aside. Raises ConfigError if there is none.
    """
    topic, partition, offset = parse_place(place)
    known = topics(log)
    if topic not in known:
        raise ConfigError(
            f"{place}: there are no letters of a topic {topic!r}; of {', '.join(known) or 'none'}"
            " there may be"
        )
    for letter in letters(log, topic):
        if (letter.partition, letter.offset) == (partition, offset):
            return letter
    raise ConfigError(
        f"{place}: this record is no dead letter; `streamrl dead-letters list RUN` shows those"
    )


def parse_place(place: str) -> tuple[str, int, int]:
    """The topic, partition and offset of a place, as `rollouts.copy[0]@17`. Raises ConfigError."""
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ConfigError(
            f"{place!r} is not the place of a record; write it as rollouts.copy-digits[0]@17"
        )
    return match[1], int(match[2]), int(match[3])


def retry(log: Log, among: list[str], chosen: Callable[[DeadLetter], bool]) -> dict[str, int]:
    """Requeue the chosen letters of these topics. Returns the number of letters by topic.

    A letter is requeued only once, and only if it keeps all of its record. The record gets a new
    offset, and its fate at the old offset stays. The record and its requeue marker are written in
    one transaction, so a retry that was interrupted can be run again.
    """
    # The writer comes first. It fences another retry and ends its open transaction, so the requeue
    # markers that are read now are complete.
    writer = log.writer(IDENTITY)
    counts: dict[str, int] = {}
    try:
        for topic in among:
            done = requeued_letters(log, topic)
            wanted = (
                letter
                for letter in letters(log, topic)
                if (letter.message.partition, letter.message.offset) not in done
                and letter.is_whole
                and chosen(letter)
            )
            for chunk in split_by_size(wanted, _size_of, CHUNK_LETTERS, CHUNK_BYTES):
                writer.commit([message for letter in chunk for message in requeue(letter)])
                counts[topic] = counts.get(topic, 0) + len(chunk)
    finally:
        writer.close()
    return counts


def _size_of(letter: DeadLetter) -> int:
    return len(letter.message.value or b"")


def fields(value: bytes) -> Iterator[tuple[str, str]]:
    """The (name, value) of each field of a record, which should be a MessagePack map.

    Bytes that cannot be read end the iteration with a pair that has no name and tells where they
    begin.
    """
    unpacker: Any = msgpack.Unpacker(
        max_buffer_size=max(len(value), 1),
        unicode_errors="backslashreplace",
        strict_map_key=False,
        ext_hook=_extension,
    )
    unpacker.feed(value)
    try:
        for _ in range(unpacker.read_map_header()):
            yield str(unpacker.unpack()), _abbreviate(repr(unpacker.unpack()))
        if unpacker.tell() < len(value):
            yield "", f"{len(value) - unpacker.tell()} more bytes after the map"
    except Exception as error:  # Broken bytes may raise anything.
        reason = _abbreviate(str(error)) or type(error).__name__
        yield "", f"cannot be read from byte {unpacker.tell()} on ({reason})"


def array_faults(value: bytes) -> Iterator[str]:
    """A line for each array of a record that cannot be read, as `turns[1].tokens: reason`."""

    def unreadable(code: int, data: bytes) -> _Unreadable | None:
        if code != ARRAY:
            return _Unreadable(f"extension type {code} is no array, which has {ARRAY}")
        try:
            unpack_array(memoryview(data))
        except ValueError as error:
            return _Unreadable(str(error))
        return None

    try:
        record: Any = msgpack.unpackb(
            value, unicode_errors="backslashreplace", strict_map_key=False, ext_hook=unreadable
        )
    except Exception:  # Broken bytes may raise anything; `fields` shows how far they can be read.
        return
    yield from _unreadable_at(record, "")


class _Unreadable(str):
    """The reason why an array cannot be read, in place of the array."""


def _unreadable_at(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, _Unreadable):
        yield f"{path}: {value}"
    elif isinstance(value, dict):
        for name, inner in cast(dict[Any, Any], value).items():
            yield from _unreadable_at(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(cast(list[Any], value)):
            yield from _unreadable_at(inner, f"{path}[{index}]")


def _extension(code: int, data: bytes) -> Any:
    """Unpack an array. Another extension type is replaced by its size."""
    if code != ARRAY:
        return f"extension {code}, {len(data)} bytes"
    try:
        return unpack_array(memoryview(data))
    except ValueError as error:
        return f"array that cannot be read: {error}"


def _abbreviate(text: str) -> str:
    if len(text) <= VALUE_CHARS:
        return text
    return f"{text[:VALUE_CHARS]}... ({len(text):,} characters)"
