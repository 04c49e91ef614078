"""Is an answer the same mathematics as the right one? By Hugging Face's math-verify, within a time
limit whatever it is given.

The library parses LaTeX and lets SymPy compare: on inputs such as 9^{9^{9^9}} that hangs, or takes
all memory, below any time-out of Python's own. So it works in a process of its own (`bounded.py`),
and an answer that it does not come to an end with is a failed rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from streamrl.envs.api import Answer, Problem
from streamrl.envs.engine import turns
from streamrl.envs.sandbox.subprocess_call import SubprocessCall


class MathVerify:
    """1 where the last thing said is the problem's answer, written any way; 0 where it is not.
    Raises Gone where that cannot be told in time.

    The problem's `answer` is the right one as text, or has it under `key`.
    """

    def __init__(
        self,
        timeout_s: float = 5.0,
        memory_mib: int = 2048,
        key: str = "",
        processes: int = 2,
        allow_reading: bool = False,
    ) -> None:
        if timeout_s <= 0 or memory_mib < 512 or processes < 1:
            raise ValueError(
                f"timeout_s {timeout_s:g}, memory_mib {memory_mib}, processes {processes}: need more than 0, 512 for SymPy, and 1"
            )
        self.key = key
        self._all = [
            SubprocessCall(
                "streamrl.envs.shipped.math_verify:same", timeout_s, memory_mib, "", allow_reading
            )
            for _ in range(processes)
        ]
        # one that has started before the others
        self._idle: asyncio.LifoQueue[SubprocessCall] = asyncio.LifoQueue()
        for same in self._all:
            self._idle.put_nowait(same)

    async def __call__(
        self, problem: Problem, answer: Answer, earned: Mapping[str, float]
    ) -> float:
        right: Any = problem.answer[self.key] if self.key else problem.answer
        async with turns.taken(self._idle) as same:
            return float(await same(str(right), answer.text))

    async def close(self) -> None:
        for same in self._all:
            await same.close()


def same(right: str, said: str) -> bool:
    """math-verify's own verdict; plain text counts as LaTeX. Its time-outs are off: this runs in a
    process that is ended from outside.
    """
    from math_verify import parse, verify

    # it warns at every call that its time-outs are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(right, parsing_timeout=0) or parse(f"${right}$", parsing_timeout=0)
    return bool(verify(gold, parse(said, parsing_timeout=0), timeout_seconds=0))
