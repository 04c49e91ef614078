"""How a recorded partition is written again so that every record gets its old offset. Journals and
fates refer to records by their offsets.

Offsets that no reader sees are transaction markers and what aborted transactions left. Both can be
made again: a committed transaction takes one offset after its records, and an aborted one of n
records takes n + 1. So a gap of one offset is closed by committing what is before it, a larger
one by an aborted transaction, and everything else is written plainly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from streamrl.stream.log.protocol import Message, TopicPartition

MAX_OP_MESSAGES = 1_000
MAX_OP_BYTES = 4_000_000


class WriteOp(NamedTuple):
    """What one partition gets next: `messages`, then `gap` offsets that no reader sees, up to
    `end`.
    """

    tp: TopicPartition
    messages: list[Message]
    gap: int
    end: int

    @property
    def committed(self) -> bool:
        """Whether the messages are a separate transaction, whose marker is the gap. Otherwise
        they are written plainly.
        """
        return self.gap == 1

    @property
    def placeholder_count(self) -> int:
        """Records of the aborted transaction that, with its marker, makes a gap of more than one
        offset.
        """
        return max(0, self.gap - 1)

    @property
    def placeholders(self) -> Iterator[Message]:
        start = self.end - self.gap
        for offset in range(start, start + self.placeholder_count):
            yield placeholder(self.tp, offset)


def plan_writes(
    tp: TopicPartition, start: int, end: int, messages: Iterable[Message]
) -> Iterator[WriteOp]:
    """The ops of bounded size that fill an empty partition up to `end`. `messages`: what a reader
    sees, from `start` on.

    Below `start` retention has deleted everything: placeholders are written there, to be deleted
    again. Raises ValueError for the one gap that cannot be made, a single offset before everything
    else.
    """
    deleted = (placeholder(tp, offset) for offset in range(start))
    last = placeholder(tp, end)  # is after the last message and is never written
    pending: list[Message] = []
    pending_bytes = 0
    next_offset = 0
    for message in chain(deleted, messages, (last,)):
        gap = message.offset - next_offset
        if gap == 1 and not pending:
            raise ValueError(
                f"{tp[0]}[{tp[1]}] begins with a single offset that holds nothing; "
                "Kafka has no way to write that"
            )
        is_full = len(pending) >= MAX_OP_MESSAGES or pending_bytes >= MAX_OP_BYTES
        if gap or message is last or is_full:
            if pending or gap:
                yield WriteOp(tp, pending, gap, message.offset)
            pending = []
            pending_bytes = 0
        pending.append(message)
        pending_bytes += len(message.value or b"")
        next_offset = message.offset + 1


def placeholder(tp: TopicPartition, offset: int) -> Message:
    """A record that is never read. It has a key, because a compacted topic takes no other."""
    return Message(tp[0], b"", b"", partition=tp[1], offset=offset)
