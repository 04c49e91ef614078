"""Writes records, and waits until they are in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from streamrl.errors import BrokerUnreachable
from streamrl.gateway.follower import RETRY_INTERVAL_S, Follower, SharedRun
from streamrl.gateway.requests import RequestRefused
from streamrl.log.codec import to_message
from streamrl.log.protocol import NonTransactionalProducer, Output

# A producer forgets a message that it could not deliver for 30 s. Before that it is written again:
# readers know a record that they have seen.
WRITE_AGAIN_S = 25.0
FLUSH_S = 5.0


class Recorder:
    """Writes records of sessions. Many calls share a flush of the producer."""

    def __init__(self, producer: NonTransactionalProducer, follower: Follower) -> None:
        self._producer = producer
        self._follower = follower
        self._flush = SharedRun(lambda: producer.flush(FLUSH_S))

    async def write(self, output: Output) -> None:
        """Write a record, and wait until the broker has it."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_AGAIN_S):
                    return await self._send([output])

    async def apply(self, outputs: Sequence[Output], is_applied: Callable[[], bool]) -> None:
        """Write records, and wait until the follower has read and applied them."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_AGAIN_S):
                    await asyncio.gather(self._send(outputs), self._follower.until(is_applied))
                    return

    async def _send(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._producer.send(to_message(output))
        while True:
            try:
                return await self._flush()
            except BrokerUnreachable:
                await asyncio.sleep(RETRY_INTERVAL_S)


@asynccontextmanager
async def limited(limit_s: float) -> AsyncIterator[None]:
    """Raises RequestRefused if the log does not answer within this time."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise RequestRefused(
            503, f"the log has not answered within {limit_s:g} s; ask again", retry_after_s=1
        ) from None
