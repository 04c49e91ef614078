"""What was put aside, to be looked at and put back: reads `dead-letters.<topic>`, changes nothing
but by `retry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from streamrl.errors import ConfigError
from streamrl.log.codec import ARRAY, unpack_array
from streamrl.log.dead_letters import TOPIC, DeadLetter, parse_dead_letter, requeue, requeued_offset
from streamrl.log.protocol import Log, Message
from streamrl.log.records_of import messages_of

IDENTITY = "dead-letters"  # of the one writer that puts letters back
CHUNK_LETTERS = 500  # put back in one transaction
CHUNK_BYTES = 4_000_000
VALUE_CHARS = 100  # shown of a field
_PLACE = re.compile(r"(.+)\[(\d+)\]@(\d+)")
_VARIABLE_PART = re.compile(
    r"""(?<!\w)'[^']*'(?!\w)|(?<!\w)"[^"]*"(?!\w)|(?<![\w<])\d+(\.\d+)?(?!\w)"""
)


@dataclass
class CauseSummary:
    """Letters of one topic with causes of one kind."""

    letters: int
    retried: int  # of them, put back
    first: DeadLetter
    last: DeadLetter


def topics(log: Log) -> list[str]:
    """The topics that have a place for their letters."""
    return sorted(topic.removeprefix(TOPIC) for topic in log.topics() if topic.startswith(TOPIC))


def messages(log: Log, topic: str) -> Iterator[Message]:
    """Letters of a topic and notes about them, as far as they go now."""
    return messages_of(log, TOPIC + topic)


def letters(log: Log, topic: str) -> Iterator[DeadLetter]:
    return (letter for message in messages(log, topic) if (letter := parse_dead_letter(message)))


def retried(log: Log, topic: str) -> set[tuple[int, int]]:
    """(partition, offset) of the letters that were put back."""
    found = ((message.partition, requeued_offset(message)) for message in messages(log, topic))
    return {(partition, offset) for partition, offset in found if offset is not None}


_TERMS = {
    r"Expected `numpy\.ndarray`, got `(\w+)`": (
        rf"expected an array (extension type {ARRAY}), got \1"
    ),
    r"Expected `(\w+)`, got `(\w+)`": r"expected \1, got \2",
    r"Object missing required field `(\w+)`": r"the field \1 is missing",
    r" - at `\$\.?([^`]*)`": r", at \1",
}
"""How our decoder puts it -> how somebody does who writes another language. Causes in the log stay
as they are: a replay compares them.
"""


def readable_cause(cause: str) -> str:
    for pattern, words in _TERMS.items():
        cause = re.sub(pattern, words, cause)
    return cause


def cause_pattern(cause: str) -> str:
    """A cause without what differs from record to record: what it quotes, and numbers."""
    return _VARIABLE_PART.sub("…", cause)


def summarize_causes(log: Log) -> dict[tuple[str, str], CauseSummary]:
    """(topic, kind of cause) -> its letters, in the order in which they came."""
    rows: dict[tuple[str, str], CauseSummary] = {}
    for topic in topics(log):
        done = retried(log, topic)
        for letter in letters(log, topic):
            row = rows.setdefault(
                (topic, cause_pattern(letter.cause)), CauseSummary(0, 0, letter, letter)
            )
            row.letters = row.letters + 1
            row.last = letter
            row.retried += (letter.message.partition, letter.message.offset) in done
    return rows


def find(log: Log, place: str) -> DeadLetter:
    """The letter of the record that lay at `place`, as `rollouts.copy[0]@17`; the first, if two
    parts put it aside. Raises ConfigError.
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
        f"{place}: this record was not put aside; `streamrl dead-letters list RUN` shows what was"
    )


def parse_place(place: str) -> tuple[str, int, int]:
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ConfigError(
            f"{place!r} is not the place of a record; write it as rollouts.copy-digits[0]@17"
        )
    return match[1], int(match[2]), int(match[3])


def retry(log: Log, among: list[str], chosen: Callable[[DeadLetter], bool]) -> dict[str, int]:
    """Put the chosen letters of these topics back to where they came from, each once for ever.
    Returns how many, by topic.

    A letter that does not keep all of its record is left alone. A record put back is a new record
    at a new offset: the fate of the old one stays. The record and the note that it was put back are
    one transaction, so that a retry that dies half way leaves nothing half done, and the next goes
    on behind it.
    """
    # First of all: it fences another retry and ends what that left open. Only now it is known what
    # was put back.
    writer = log.writer(IDENTITY)
    counts: dict[str, int] = {}
    try:
        for topic in among:
            done = retried(log, topic)
            left = (
                letter
                for letter in letters(log, topic)
                if (letter.message.partition, letter.message.offset) not in done
            )
            wanted = (letter for letter in left if letter.is_whole and chosen(letter))
            for chunk in chunks(wanted):
                writer.commit([message for letter in chunk for message in requeue(letter)])
                counts[topic] = counts.get(topic, 0) + len(chunk)
    finally:
        writer.close()
    return counts


def chunks(wanted: Iterator[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Of bounded size. What is refused again in the meantime is not among them: `read` ends where
    the topic ended when it began.
    """
    chunk = list[DeadLetter]()
    size = 0
    for letter in wanted:
        chunk.append(letter)
        size += len(letter.message.value or b"")
        if len(chunk) >= CHUNK_LETTERS or size >= CHUNK_BYTES:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def fields(value: bytes) -> Iterator[tuple[str, str]]:
    """(field, value) of what should be a MessagePack map, as far as it can be read; the last says
    where that ends, unless it is well.
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
            yield "", f"{len(value) - unpacker.tell()} more bytes behind the map"
    except Exception as error:  # whatever it finds wrong with bytes that are known to be wrong
        yield (
            "",
            (
                f"cannot be read from byte {unpacker.tell()} on"
                f" ({_abbreviate(str(error)) or type(error).__name__})"
            ),
        )


def array_faults(value: bytes) -> Iterator[str]:
    """Every array in a record that cannot be read, as `turns[1].tokens: why`."""

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
    except Exception:  # bytes that are known to be wrong; `fields` says as far as they can be read
        return
    yield from _unreadable_at(record, "")


class _Unreadable(str):
    """Stands for an array: why it cannot be read."""


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
    """Arrays as they are, other extensions by their size."""
    try:
        return (
            unpack_array(memoryview(data))
            if code == ARRAY
            else f"extension {code}, {len(data)} bytes"
        )
    except ValueError as error:
        return f"array that cannot be read: {error}"


def _abbreviate(text: str) -> str:
    return (
        text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}... ({len(text):,} characters)"
    )
