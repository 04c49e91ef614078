"""The records of one kind in a topic or a partition: those that it has now, or as they arrive."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import TypeVar

from streamrl.config import topology
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Message, TopicPartition, beginning_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import RECORDS, Record, Rollout

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

POLL_S = 0.05
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
        record = record_in(message, kind)
        if record is not None:
            yield record, message


def rollouts_of(log: Log, envs: Collection[str]) -> Iterator[tuple[str, Rollout, Message]]:
    """The rollouts of these envs, each with its env and the message that carries it. A topic that
    envs share is read once.
    """
    for family in topology.families(envs):
        for rollout, message in records_of(log, topology.rollouts(family), Rollout):
            named = rollout.environment
            env = topology.env_of(message.topic, named, [named])  # also if it is not asked for
            if env in envs:
                yield env, rollout, message


def record_in(message: Message, kind: type[R]) -> R | None:
    """The record of a message. None if it is of another kind or cannot be read."""
    record = to_event(message, (SCHEMA_OF[kind],)).record
    return record if isinstance(record, kind) else None


def read_records(
    log: Log, partition: TopicPartition, kind: type[R], start: int = 0
) -> Iterator[tuple[R, int]]:
    """The records of one kind that a partition has now, from the offset `start` on, each with its
    own offset. Messages that cannot be read are skipped with a warning.
    """
    for message in read(log, *partition, max(start, beginning_offset(log, *partition))):
        record = _record_or_warning(message, kind)
        if record is not None:
            yield record, message.offset


def follow_records(
    log: Log, partition: TopicPartition, kind: type[R], start: int = 0
) -> Iterator[tuple[R, int] | None]:
    """Like `read_records`, but never ends: yields None after each poll that finds no record."""
    reader = log.reader({partition: max(start, beginning_offset(log, *partition))})
    with closing(reader):
        while True:
            result = None
            for message in reader.poll(1, POLL_S):
                record = _record_or_warning(message, kind)
                result = None if record is None else (record, message.offset)
            yield result


def _record_or_warning(message: Message, kind: type[R]) -> R | None:
    record = to_event(message, (SCHEMA_OF[kind],)).record
    if isinstance(record, kind):
        return record
    logger.warning(
        "%s@%d is skipped, because it cannot be read: %s",
        message.topic,
        message.offset,
        record,
    )
    return None
