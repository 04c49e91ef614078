"""How a recorded partition is written again so that every record gets its old offset: journals and
fates refer to records by their offsets.

Offsets that no reader sees are transaction markers and what aborted transactions left. Both can be
made again: a committed transaction takes one offset behind its records, an aborted one of n records
takes n + 1. So a gap of one is closed by committing what lies before it, a larger one by an
aborted transaction; everything else is written plainly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from streamrl.log.protocol import Message, TopicPartition

CHUNK_MESSAGES = 1_000
CHUNK_BYTES = 4_000_000


class WriteOp(NamedTuple):
    """What one partition gets next: `messages`, then `gap` offsets that no reader sees, up to
    `end`.
    """

    where: TopicPartition
    messages: list[Message]
    gap: int
    end: int

    @property
    def committed(self) -> bool:
        """Are the messages a transaction of their own, whose marker is the gap? Otherwise they are
        written plainly.
        """
        return self.gap == 1

    @property
    def placeholders(self) -> Iterator[Message]:
        """The records of the aborted transaction that makes a larger gap together with its marker."""
        start = self.end - self.gap
        return (
            (placeholder(self.where, offset) for offset in range(start, self.end - 1))
            if self.gap > 1
            else iter(())
        )


def plan_writes(
    where: TopicPartition, start: int, end: int, messages: Iterable[Message]
) -> Iterator[WriteOp]:
    """The steps that fill an empty partition up to `end`, in chunks of bounded size. `messages`:
    what a reader sees, from `start` on.

    Below `start` retention has deleted everything: placeholders stand there, to be deleted again. Raises
    ValueError for the one gap that cannot be made: a single offset before everything else.
    """
    deleted = (placeholder(where, offset) for offset in range(start))
    stop = placeholder(where, end)  # stands behind the last; never written
    run, size, following = list[Message](), 0, 0
    for message in chain(deleted, messages, (stop,)):
        gap = message.offset - following
        if gap == 1 and not run:
            raise ValueError(
                f"{where[0]}[{where[1]}] begins with a single offset that holds nothing; Kafka has no way to write that"
            )
        if gap or message is stop or len(run) >= CHUNK_MESSAGES or size >= CHUNK_BYTES:
            if run or gap:
                yield WriteOp(where, run, gap, message.offset)
            run, size = [], 0
        run.append(message)
        size += len(message.value or b"")
        following = message.offset + 1


def placeholder(where: TopicPartition, offset: int) -> Message:
    """A record nobody will read. It has a key: a compacted topic takes no other."""
    return Message(where[0], b"", b"", partition=where[1], offset=offset)
