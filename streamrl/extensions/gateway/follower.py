"""Reads the log on one thread, and applies what it reads on the event loop that serves requests.

Records are applied in the order of the log, each once. A record of this replica is known by its
offset as soon as the broker has it, so it is applied, in its turn, without being read back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from streamrl.extensions.gateway.requests import RequestRejected
from streamrl.stream.log.protocol import Log, Message, Reader, TopicPartition
from streamrl.system.errors import BrokerUnreachable

T = TypeVar("T")
POLL_S = 0.2
MAX_MESSAGES = 500
RETRY_INTERVAL_S = 0.5


class CoalescedCall(Generic[T]):
    """Calls a function in a thread, once for all who await it meanwhile. Those who await it during
    a call get the result of the next call, so no result is older than the wait for it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._next: asyncio.Future[T] | None = None
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await asyncio.shield(self._next)

    async def _work(self) -> None:
        while self._next is not None:
            waiting = self._next
            self._next = None
            try:
                result = await asyncio.to_thread(self._function)
            except Exception as error:
                waiting.set_exception(error)
                waiting.exception()  # the caller may have left
            else:
                waiting.set_result(result)


class Follower:
    """How far the log has been read. `apply` and all methods but `follow` belong to the loop."""

    def __init__(
        self,
        log: Log,
        partitions: Sequence[TopicPartition],
        apply: Callable[[Sequence[Message]], None],
    ) -> None:
        self.positions = dict.fromkeys(partitions, 0)
        self._apply = apply
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        # records of this replica that are in the log and not yet applied, by their offsets
        self._written: dict[TopicPartition, dict[int, Message]] = {tp: {} for tp in partitions}
        self._ends = CoalescedCall(lambda: log.end_offsets(partitions))

    async def catch_up(self, limit_s: float) -> None:
        """Wait until everything is applied that was in the log when this was called. Raises
        RequestRejected if that takes longer than `limit_s`.
        """
        async with log_timeout(limit_s):
            while True:
                try:
                    ends = await self._ends()
                    break
                except BrokerUnreachable:
                    await asyncio.sleep(RETRY_INTERVAL_S)
            await self.until(lambda: self.is_at(ends))

    def is_at(self, ends: Mapping[TopicPartition, int]) -> bool:
        return all(self.positions[tp] >= end for tp, end in ends.items())

    def on_written(self, message: Message) -> None:
        """Note that a record of this replica is in the log, at the offset of `message`. It is one
        message there: only a reader can tell whether chunks make a record.
        """
        tp = message.topic, message.partition
        if tp in self.positions and self._is_new(message):
            self._written[tp][message.offset] = message
            self._apply_written(tp)
            self._wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what has been applied makes `condition` true."""
        if condition():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = condition
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def follow(
        self,
        reader: Reader,
        loop: asyncio.AbstractEventLoop,
        is_over: Callable[[], bool],
    ) -> None:
        """Read until `is_over`. What is read is applied before more is read."""
        while not is_over():
            messages = reader.poll(1, POLL_S)
            if messages:
                messages += reader.poll(MAX_MESSAGES, 0)
            positions = {tp: reader.position(*tp) for tp in self.positions}
            messages = [message for message in messages if self._is_new(message)]
            if not messages and all(self.positions[tp] >= at for tp, at in positions.items()):
                continue
            applied = Future[None]()
            try:
                loop.call_soon_threadsafe(self._advance, messages, positions, applied)
            except RuntimeError:  # the loop has ended meanwhile
                return
            while not is_over():
                with suppress(TimeoutError):
                    applied.result(POLL_S)
                    break

    def _advance(
        self,
        messages: Sequence[Message],
        positions: dict[TopicPartition, int],
        applied: Future[None],
    ) -> None:
        try:
            self._apply([message for message in messages if self._is_new(message)])
            for tp, position in positions.items():
                self.positions[tp] = max(self.positions[tp], position)
                self._apply_written(tp)
            self._wake()
        except BaseException as error:
            applied.set_exception(error)
        else:
            applied.set_result(None)

    def _is_new(self, message: Message) -> bool:
        """Whether it has not been applied yet. What is in no partition that is waited for is."""
        return message.offset >= self.positions.get((message.topic, message.partition), 0)

    def _apply_written(self, tp: TopicPartition) -> None:
        """Apply the records of this replica that are the next ones of the partition, and forget
        those that have been read.
        """
        written = self._written[tp]
        for offset in sorted(written):
            if offset > self.positions[tp]:
                return
            message = written.pop(offset)
            if offset == self.positions[tp]:
                self._apply([message])
                self.positions[tp] = offset + 1

    def _wake(self) -> None:
        for waiter, condition in list(self._waiters.items()):
            if not waiter.done() and condition():
                waiter.set_result(None)


@asynccontextmanager
async def log_timeout(limit_s: float) -> AsyncIterator[None]:
    """Raises RequestRejected if the log does not answer within this time."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise RequestRejected(
            503, f"the log has not answered within {limit_s:g} s; ask again", retry_after_s=1
        ) from None
