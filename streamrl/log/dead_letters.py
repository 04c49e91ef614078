"""What cannot be used is put aside, never lost: its bytes go to `dead-letters.<topic>` with the
cause, and a rollout gets its fate.

Of a record that is larger than a message may be (compressed on its way here, or sent in chunks) the
letter keeps the first bytes and the hash of all; the record itself stays where it lies until
retention deletes it.

Headers are those that Kafka Connect writes, so that ordinary tools show them. A letter that was put
back where it came from (`recordings/dead_letters.py`) is followed by a note in the same topic that says so:
a null record whose header names the letter's offset.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from streamrl.config import topology
from streamrl.log.chunks import is_chunk, size_of
from streamrl.log.protocol import Event, Message, Output, Undecodable
from streamrl.records import Fate, Rollout

TOPIC = f"{topology.DEAD_LETTERS}."  # followed by the topic that the letters come from
PREFIX = "__connect.errors."
RETRIED = "streamrl.retried"
SHA256 = "streamrl.sha256"
ADDRESS = re.compile("0x[0-9a-fA-F]+")
CAUSE_CHARS = 300  # a cause may quote what it complains of
WHOLE_BYTES = 8 * 1024 * 1024  # a record above it is kept by its first bytes
HEAD_BYTES = 65_536


class DeadLetter(NamedTuple):
    """A record that was put aside: where it lay, why, and the message that keeps it."""

    topic: str
    partition: int
    offset: int
    cause: str
    message: Message

    @property
    def is_whole(self) -> bool:
        """Does it keep all of the record? Otherwise it cannot be put back."""
        return SHA256 not in dict(self.message.headers)

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def to_dead_letter(event: Event, cause: str, stage: str = "VALUE_CONVERTER") -> list[Output]:
    """The dead letter of an event, and its fate if it is a rollout. `cause` says what is wrong with
    it, in a line.
    """
    cause = printable(cause)
    raw = (
        event.record
        if isinstance(event.record, Undecodable)
        else Undecodable(cause, event.value, event.headers)
    )
    kept = Message(
        event.topic, event.key.encode("utf-8", "surrogateescape"), raw.value, raw.headers
    )
    whole, said, key = raw.value or b"", cause, event.key
    if is_chunk(kept):  # without the headers that say so: the letter is none
        kept = kept._replace(headers=(*kept.headers[2:], (SHA256, _sha256(whole))))
    if size_of(kept) > WHOLE_BYTES:
        said = f"{cause}; of its {len(whole):,} bytes the first {HEAD_BYTES:,} are kept"
        kept, key = (
            kept._replace(
                value=whole[:HEAD_BYTES], headers=(*bounded(kept.headers), (SHA256, _sha256(whole)))
            ),
            key[:CAUSE_CHARS],
        )
    errors = {
        "topic": event.topic,
        "partition": str(event.partition),
        "offset": str(event.offset),
        "stage": stage,
        "exception.class.name": "InvalidRecord",
        "exception.message": said,
    }
    headers = (*kept.headers, *((PREFIX + name, text.encode()) for name, text in errors.items()))
    letter = Output(TOPIC + event.topic, key, Undecodable(cause, kept.value, headers))
    kind, _, environment = event.topic.partition(".")
    if kind != "rollouts":
        return [letter]
    uids, versions = [], None
    if isinstance(event.record, Rollout):
        uids, versions = (
            [event.record.rollout_uid],
            np.array([event.record.policy_version], np.int32),
        )
    fate = Fate(
        fate="invalid",
        environment=environment,
        partition=event.partition,
        offsets=np.array([event.offset]),
        uids=uids,
        policy_versions=versions,
        cause=cause,
    )
    return [letter, Output(topology.FATES, environment, fate)]


def _sha256(value: bytes) -> bytes:
    return hashlib.sha256(value).hexdigest().encode()


def bounded(headers: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The first headers, HEAD_BYTES together at most."""
    left = HEAD_BYTES
    for name, value in headers:
        left -= len(name) + len(value)
        if left < 0:
            return
        yield name, value


def printable(text: str) -> str:
    """One line of bounded length that does nothing to a terminal, whatever a sender has put into
    it.
    """
    safe = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:CAUSE_CHARS]
    )
    return safe + "..." if len(text) > CAUSE_CHARS else safe


def text_of(error: Exception) -> str:
    """Type and text of an exception in one line, without addresses of objects: a replay finds
    others.
    """
    return printable(ADDRESS.sub("0x...", f"{type(error).__name__}: {error}"))


def parse_dead_letter(message: Message) -> DeadLetter | None:
    """The letter that a message of `dead-letters.<topic>` is; None for anything else: a note that
    one was put back, a letter of another topic.
    """
    headers = dict(message.headers)
    try:
        partition, offset = (int(headers[PREFIX + name]) for name in ("partition", "offset"))
        topic, cause = (headers[PREFIX + name].decode() for name in ("topic", "exception.message"))
    except (KeyError, ValueError):
        return None
    # whoever may write letters of one topic may not write to another through whoever puts them back
    if message.topic != TOPIC + topic:
        return None
    return DeadLetter(topic, partition, offset, cause, message)


def requeue(letter: DeadLetter) -> list[Message]:
    """The record as it came, for the topic it came from, and the note that it was put back: to be
    written in one transaction.
    """
    kept, headers = (
        letter.message,
        tuple(header for header in letter.message.headers if not header[0].startswith(PREFIX)),
    )
    again = Message(letter.topic, kept.key, kept.value, headers)
    note = Message(
        kept.topic, kept.key, None, ((RETRIED, str(kept.offset).encode()),), kept.partition
    )
    return [again, note]


def requeued_offset(message: Message) -> int | None:
    """Offset of the letter that a note says was put back; None when the message is no note."""
    offset = dict(message.headers).get(RETRIED, b"") if message.value is None else b""
    return int(offset) if offset.isdigit() else None
