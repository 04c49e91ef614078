"""Dead letters. A record that cannot be used is dead-lettered and never lost: its bytes go to
`dead-letters.<topic>` with the cause, and a rollout gets its fate.

A record that is larger than a message may be, because it was compressed on its way here or sent in
chunks, does not fit into a letter. The letter then keeps its first bytes and the hash of all; the
record itself stays in its topic until retention deletes it.

The headers are those that Kafka Connect writes, so that ordinary tools show them. A letter that was
requeued, which means written again to the topic it came from
(`extensions/recordings/dead_letters.py`), is followed by a requeue marker in its own topic: a null
record whose header names the letter's offset.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from streamrl.config import topology
from streamrl.stream.log.chunks import is_chunk, size_of
from streamrl.stream.log.protocol import UNREADABLE, Event, Message, Output, Undecodable
from streamrl.stream.records import Fate, FateColumns, Rollout, columns_of_fate
from streamrl.system.text import printable

TOPIC_PREFIX = topology.dead_letters("")
PREFIX = "__connect.errors."
REQUEUED = "streamrl.retried"  # header of a requeue marker
SHA256 = "streamrl.sha256"  # header of a letter that does not keep the whole record
MEMORY_ADDRESS = re.compile("0x[0-9a-fA-F]+")
MAX_KEY_CHARS = 300  # of a record that is not kept whole
MAX_BYTES = 8 * 1024 * 1024  # of a larger record only the first HEAD_BYTES are kept
HEAD_BYTES = 65_536


class DeadLetter(NamedTuple):
    """A record that could not be used: where it was, why, and the message that keeps it."""

    topic: str
    partition: int
    offset: int
    cause: str
    message: Message

    @property
    def is_whole(self) -> bool:
        """Whether the letter keeps all of the record. Otherwise it cannot be requeued."""
        return not {SHA256, UNREADABLE} & dict(self.message.headers).keys()

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def to_dead_letter(
    event: Event, cause: str, stage: str = "VALUE_CONVERTER", env: str = ""
) -> list[Output]:
    """The dead letter of an event, and its fate if it is a rollout. `cause` is in one line what
    is wrong with it. `env` is whose rollout it is; empty: what its topic is named after.
    """
    cause = printable(cause)
    letter = _letter(event, cause, stage)
    if topology.kind_of(event.topic) != topology.ROLLOUTS:
        return [letter]
    environment = env or topology.subject_of(event.topic)
    uids: list[str] = []
    columns = FateColumns()
    if isinstance(event.record, Rollout):
        uids = [event.record.rollout_uid]
        columns = columns_of_fate([event.record])
    fate = Fate(
        fate="invalid",
        environment=environment,
        partition=event.partition,
        offsets=np.array([event.offset]),
        uids=uids,
        **columns,
        cause=cause,
    )
    return [letter, Output(topology.FATES, environment, fate)]


def _letter(event: Event, cause: str, stage: str) -> Output:
    raw = event.record
    if not isinstance(raw, Undecodable):
        raw = Undecodable(cause, event.value, event.headers)
    key = event.key
    message = cause
    value = raw.value or b""
    kept = Message(event.topic, key.encode("utf-8", "surrogateescape"), raw.value, raw.headers)
    if is_chunk(kept):  # the letter itself is no chunk, so it loses the headers of one
        kept = kept._replace(headers=(*kept.headers[2:], (SHA256, _sha256(value))))
    if size_of(kept) > MAX_BYTES:
        message = f"{cause}; of its {len(value):,} bytes the first {HEAD_BYTES:,} are kept"
        headers = (*_first_headers(kept.headers), (SHA256, _sha256(value)))
        kept = kept._replace(value=value[:HEAD_BYTES], headers=headers)
        key = key[:MAX_KEY_CHARS]
    errors = {
        "topic": event.topic,
        "partition": str(event.partition),
        "offset": str(event.offset),
        "stage": stage,
        "exception.class.name": "InvalidRecord",
        "exception.message": message,
    }
    error_headers = [(PREFIX + name, text.encode()) for name, text in errors.items()]
    record = Undecodable(cause, kept.value, (*kept.headers, *error_headers))
    return Output(topology.dead_letters(event.topic), key, record)


def _sha256(value: bytes) -> bytes:
    return hashlib.sha256(value).hexdigest().encode()


def _first_headers(headers: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """As many headers from the first on as have at most HEAD_BYTES together."""
    left = HEAD_BYTES
    for name, value in headers:
        left -= len(name) + len(value)
        if left < 0:
            return
        yield name, value


def text_of(error: Exception) -> str:
    """Type and text of an exception in one line, without memory addresses, which a replay would
    find different.
    """
    return printable(MEMORY_ADDRESS.sub("0x...", f"{type(error).__name__}: {error}"))


def parse_dead_letter(message: Message) -> DeadLetter | None:
    """The letter that a message of `dead-letters.<topic>` is. None for anything else, such as a
    requeue marker or a letter of another topic.
    """
    headers = dict(message.headers)
    try:
        partition = int(headers[PREFIX + "partition"])
        offset = int(headers[PREFIX + "offset"])
        topic = headers[PREFIX + "topic"].decode()
        cause = headers[PREFIX + "exception.message"].decode()
    except (KeyError, ValueError):
        return None
    # Those who may write letters of one topic must not be able to write to another by means of
    # the user who requeues them.
    if message.topic != topology.dead_letters(topic):
        return None
    return DeadLetter(topic=topic, partition=partition, offset=offset, cause=cause, message=message)


def requeue(letter: DeadLetter) -> list[Message]:
    """The record as it came, for the topic it came from, and the requeue marker. They are to be
    written in one transaction.
    """
    kept = letter.message
    own_headers = tuple(header for header in kept.headers if not header[0].startswith(PREFIX))
    record = Message(letter.topic, kept.key, kept.value, own_headers)
    marker_headers = ((REQUEUED, str(kept.offset).encode()),)
    marker = Message(
        topic=kept.topic, key=kept.key, value=None, headers=marker_headers, partition=kept.partition
    )
    return [record, marker]


def requeued_offset(message: Message) -> int | None:
    """Offset of the letter that a requeue marker names. None when the message is no marker."""
    if message.value is not None:
        return None
    offset = dict(message.headers).get(REQUEUED, b"")
    return int(offset) if offset.isdigit() else None
