"""Time limits on an env's code, which do not count the time that it waits in a queue.

`with_time_limit` bounds a call. The call may have to wait for something scarce: a process, or a
thread. With `acquired` and `borrowed` the limit begins only once the wait is over, so no call fails
because of the queue before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

# How many reward functions run at once in threads. More would only wait for Python's lock. A thread
# that is late is abandoned and makes room for another.
REWARD_THREADS = 16


class TimeLimitExceeded(Exception):
    """A call took longer than its limit."""


_CURRENT_LIMIT: ContextVar[tuple[asyncio.Timeout, float] | None] = ContextVar(
    "current_limit", default=None
)


async def with_time_limit(work: Awaitable[T], limit_s: float, what: str) -> T:
    """The result of the work. Raises TimeLimitExceeded, which names `what`, if it takes longer."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            outer = _CURRENT_LIMIT.set((limit, limit_s))
            try:
                return await work
            finally:
                _CURRENT_LIMIT.reset(outer)
    except TimeoutError:
        if not limit.expired():
            raise  # the work's own
        raise TimeLimitExceeded(f"{what} took longer than {limit_s:g} s") from None


@asynccontextmanager
async def acquired(free: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold the semaphore. The time limit around it begins once it is acquired."""
    with _limit_suspended():
        await free.acquire()
    try:
        yield
    finally:
        free.release()


@asynccontextmanager
async def borrowed(idle: asyncio.Queue[T]) -> AsyncIterator[T]:
    """Take an item out of the queue, and put it back afterwards. The time limit around it begins
    once there is one.
    """
    with _limit_suspended():
        item = await idle.get()
    try:
        yield item
    finally:
        idle.put_nowait(item)


@contextmanager
def _limit_suspended() -> Iterator[None]:
    """The time within does not count, and the limit begins anew after it."""
    current = _CURRENT_LIMIT.get()
    if current is None:
        yield
        return
    limit, limit_s = current
    limit.reschedule(None)
    yield
    limit.reschedule(asyncio.get_running_loop().time() + limit_s)


def reward_threads() -> asyncio.Semaphore:
    return asyncio.Semaphore(REWARD_THREADS)


async def call(
    function: Callable[..., Any],
    *arguments: Any,
    limit_s: float,
    threads: asyncio.Semaphore,
    what: str,
) -> Any:
    """The result of an env's function. It is awaited, or called in a thread if it is no
    coroutine function, so that everything else continues meanwhile.

    Only as many threads as `threads` allows work at once, and the time limit begins when a thread
    does. Raises TimeLimitExceeded, which names `what`.
    """
    if is_coroutine(function):
        return await with_time_limit(function(*arguments), limit_s, what)

    async def in_a_thread() -> Any:
        async with acquired(threads):
            result = await in_thread(function, *arguments)
        return await result if inspect.isawaitable(result) else result

    return await with_time_limit(in_a_thread(), limit_s, what)


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function, or an object whose `__call__` is one."""
    call_method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


async def in_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of the function, called in a separate thread.

    The thread is not one of a pool, because calls that hang would fill it. The process does not
    wait for the thread when it ends.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value = None
        error = None
        try:
            value = function(*arguments, **keywords)
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits any more
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=work, daemon=True).start()
    return await done
