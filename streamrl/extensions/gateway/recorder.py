"""Writes records, and waits until they are in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from streamrl.extensions.gateway.follower import RETRY_INTERVAL_S, Follower, log_timeout
from streamrl.stream.log.chunks import fits_message
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, NonTransactionalProducer, Output
from streamrl.system.errors import BrokerUnreachable

# A producer forgets a message that it could not deliver for 30 s. Before that it is written again:
# readers know a record that they have seen.
WRITE_AGAIN_S = 25.0
# Records with more bytes than these wait for each other, and are written in portions, one at a
# time. A record waits for all that was written before it, so it waits for no more than one portion,
# or one record, of others.
PORTION_BYTES = 1_000_000


class Recorder:
    """Writes records of sessions with a durable producer."""

    def __init__(self, producer: NonTransactionalProducer, follower: Follower) -> None:
        self._producer = producer
        self._follower = follower
        self._turn = asyncio.Lock()  # of those who write much

    async def write_and_wait(
        self, outputs: Sequence[Output], is_applied: Callable[[], bool], limit_s: float
    ) -> None:
        """Write records, and wait until the follower has applied them, and all records before them.
        `is_applied` tells whether it has. Raises RequestRejected if that takes longer than
        `limit_s`.
        """
        messages = [to_message(output) for output in outputs]
        portions = list(in_portions(messages))
        is_small = sum(map(_size, messages)) <= PORTION_BYTES
        turn = nullcontext() if is_small else self._turn
        async with log_timeout(limit_s), turn:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(WRITE_AGAIN_S):
                        for portion in portions:
                            await asyncio.gather(*map(self._send, portion))
                        return await self._follower.until(is_applied)

    async def _send(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        while True:
            written = loop.create_future()
            self._producer.send(message, partial(self._report, loop, message, written))
            try:
                return await written
            except BrokerUnreachable:
                await asyncio.sleep(RETRY_INTERVAL_S)

    def _report(
        self,
        loop: asyncio.AbstractEventLoop,
        message: Message,
        written: asyncio.Future[None],
        partition: int,
        offset: int,
    ) -> None:
        """Hand a report to the loop. The producer calls this on its thread."""
        at = message._replace(partition=partition, offset=offset)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._on_written, at, written)

    def _on_written(self, message: Message, written: asyncio.Future[None]) -> None:
        is_written = message.offset >= 0
        if is_written and fits_message(message):
            self._follower.on_written(message)
        if written.done():  # the caller has left
            return
        if is_written:
            written.set_result(None)
        else:
            written.set_exception(BrokerUnreachable("the broker has not taken the record"))


def in_portions(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The messages in lists of PORTION_BYTES at most, or of one message."""
    portion = list[Message]()
    size = 0
    for message in messages:
        size += _size(message)
        if portion and size > PORTION_BYTES:
            yield portion
            portion = []
            size = _size(message)
        portion.append(message)
    yield portion


def _size(message: Message) -> int:
    return len(message.value or b"")
