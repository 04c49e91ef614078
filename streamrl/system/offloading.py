"""Runs what takes long with a large request or answer in another thread, so that the event loop
serves all others meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 100_000  # What is about more bytes runs in the other thread.


class Offloader:
    """The other thread of an event loop, which shares the interpreter with no more than one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-requests")
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # by owner

    async def run(
        self, owner: str, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `function` returns for these arguments, which are about `size` bytes. An owner has
        one call in the thread at a time, so that no one's requests wait for all of another's.
        """
        if size <= INLINE_BYTES:
            return function(*args, **kwargs)
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
