"""Compares an answer with the right one as mathematics, by Hugging Face's math-verify.

The library parses LaTeX and lets SymPy compare. On inputs such as 9^{9^{9^9}} that hangs or takes
all memory, below any time-out of Python's own. It therefore works in a process of its own
(`sandbox/subprocess_call.py`), and an answer with which it does not come to an end is a failed
rollout.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from streamrl.envs.api import Completion, Problem
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.subprocess_call import SubprocessPool

HERE = "streamrl.envs.shipped.math_verify"


class MathVerify:
    """A reward: 1 if the last thing said is the problem's answer, written in any way, else 0.
    Raises CallFailed if that cannot be told in time.

    The right answer is the problem's `answer`, or what that has under `key`.
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
                f"timeout_s {timeout_s:g}, memory_mib {memory_mib}, processes {processes}: "
                "need more than 0, 512 for SymPy, and 1"
            )
        self.key = key
        self._same = SubprocessPool(
            f"{HERE}:same",
            SandboxLimits(timeout_s, memory_mib, allow_reading),
            prepare=f"{HERE}:load_library",
            processes=processes,
        )

    async def __call__(
        self, problem: Problem, completion: Completion, earned: Mapping[str, float]
    ) -> float:
        right: Any = problem.answer[self.key] if self.key else problem.answer
        return float(await self._same(str(right), completion.text))

    async def close(self) -> None:
        await self._same.close()


def load_library(right: str) -> None:
    """Import the library in the process that all calls are forked from, which takes a second."""
    importlib.import_module("math_verify")


def same(right: str, said: str) -> bool:
    """Whether math-verify takes both for the same; plain text counts as LaTeX. The library's own
    time-outs are off, because the process that this runs in is ended from outside.
    """
    from math_verify import parse, verify

    # the library warns at every call that its time-outs are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(right, parsing_timeout=0) or parse(f"${right}$", parsing_timeout=0)
    return bool(verify(gold, parse(said, parsing_timeout=0), timeout_seconds=0))
