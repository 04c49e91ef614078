"""What lies in a topic at this moment, read from its beginning to its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from streamrl.log.codec import to_event
from streamrl.log.protocol import Log, Message
from streamrl.log.reading import read
from streamrl.records import RECORDS, Record

R = TypeVar("R", bound=Record)

SCHEMA_OF = {record: name for name, record in RECORDS.items()}


def messages_of(log: Log, topic: str) -> Iterator[Message]:
    """The messages of a topic, partition by partition. A topic that is missing has none."""
    for partition in range(log.topics().get(topic, 0)):
        yield from read(log, topic, partition)


def records_of(log: Log, topic: str, kind: type[R]) -> Iterator[tuple[R, Message]]:
    """The records of one kind, each with the message that carries it. Messages that cannot be read
    are skipped: they have dead letters elsewhere.
    """
    for message in messages_of(log, topic):
        record = to_event(message, (SCHEMA_OF[kind],)).record
        if isinstance(record, kind):
            yield record, message
