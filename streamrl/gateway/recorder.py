"""Writes records, and waits until they are in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from streamrl.errors import BrokerUnreachable
from streamrl.gateway.follower import RETRY_INTERVAL_S, Follower, SharedRun
from streamrl.log.codec import to_message
from streamrl.log.protocol import Message, NonTransactionalProducer, Output

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

    async def write(
        self, outputs: Sequence[Output], is_applied: Callable[[], bool] = lambda: True
    ) -> None:
        """Write these records, and wait until they are in the log and `is_applied`."""
        messages = [to_message(output) for output in outputs]
        while True:
            try:
                async with asyncio.timeout(WRITE_AGAIN_S):
                    await self._send(messages)
                    await self._follower.until(is_applied)
                    return
            except TimeoutError:
                continue

    async def _send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._producer.send(message)
        while True:
            try:
                return await self._flush()
            except BrokerUnreachable:
                await asyncio.sleep(RETRY_INTERVAL_S)
