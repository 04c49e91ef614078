"""Time limits of somebody else's code, and waiting that is no part of them.

`limited` bounds a call. What it calls may have to wait for its turn at something that is scarce, a
process or a program: with `turn` and `taken` the limit begins when the turn has come, so that
nobody fails for the queue.
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


class Late(Exception):
    """It took longer than its limit."""


_LIMIT: ContextVar[tuple[asyncio.Timeout, float] | None] = ContextVar("limit", default=None)


async def limited(work: Awaitable[T], limit_s: float, what: str) -> T:
    """What comes of the work. Raises Late, which says `what`, when it takes longer."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            before = _LIMIT.set((limit, limit_s))
            try:
                return await work
            finally:
                _LIMIT.reset(before)
    except TimeoutError:
        if not limit.expired():
            raise  # its own
        raise Late(f"{what} took longer than {limit_s:g} s") from None


@asynccontextmanager
async def turn(free: asyncio.Semaphore) -> AsyncIterator[None]:
    """One of those that are free. The limit around it begins when there is one."""
    with _waiting():
        await free.acquire()
    try:
        yield
    finally:
        free.release()


@asynccontextmanager
async def taken(idle: asyncio.Queue[T]) -> AsyncIterator[T]:
    """One of those that are idle, given back afterwards. The limit around it begins when there is
    one.
    """
    with _waiting():
        one = await idle.get()
    try:
        yield one
    finally:
        idle.put_nowait(one)


@contextmanager
def _waiting() -> Iterator[None]:
    """Time that does not count."""
    found = _LIMIT.get()
    if found is None:
        yield
        return
    limit, limit_s = found
    limit.reschedule(None)
    yield
    limit.reschedule(asyncio.get_running_loop().time() + limit_s)


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Is it a coroutine function, or an object that is called like one?"""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )  # the method


async def in_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What the function returns, in a thread of its own. Not one of a pool: those that hang would
    fill it. The process does not wait for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*arguments, **keywords)
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, daemon=True).start()
    return await done
