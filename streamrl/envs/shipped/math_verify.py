"""Compares an answer with the right one as mathematics, by Hugging Face's math-verify.

What is compared is found by `math_text.py`, and given to the library in a box: outside of one it
reads `3\\sqrt{13}` as 3. SymPy compares. On inputs such as 9^{9^{9^9}} it hangs or takes all
memory, below any time-out of Python's own. It therefore works in a separate process
(`sandbox/subprocess_call.py`), and an answer with which it does not come to an end is a failed
rollout.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.envs.api import Completion, Problem
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.subprocess_call import CallFailed, SubprocessPool
from streamrl.envs.shipped.answers import (
    AnswerPlace,
    answer_in,
    check_place,
    closed_boxes,
    half_width,
    in_box,
)
from streamrl.envs.shipped.math_equality import as_words, equal, is_text, is_usable
from streamrl.envs.shipped.math_text import (
    FORMULA,
    PLAIN_NUMBER,
    said_words,
    stated_math,
)
from streamrl.envs.shipped.number_words import in_digits

HERE = "streamrl.envs.shipped.math_verify"
CHECKED_AT_ONCE = 20  # Right answers that one process checks in one call.
CHECK_S = 10.0  # The time for that; one that hangs is found by halving them.


class MathVerify:
    """A reward: 1 if the answer is the problem's answer, written in any way, else 0. It is 0 if the
    answer is cut off. Raises CallFailed if that cannot be told in time.

    The right answer is the problem's `answer`, or what that has under `key`. `answer` is where the
    policy's is read (`answers.py`).
    """

    def __init__(
        self,
        timeout_s: float = 5.0,
        memory_mib: int = 2048,
        key: str = "",
        processes: int = 2,
        allow_reading: bool = False,
        answer: AnswerPlace = "after-think",
    ) -> None:
        if timeout_s <= 0 or memory_mib < 512 or processes < 1:
            raise ValueError(
                f"timeout_s {timeout_s:g}, memory_mib {memory_mib}, processes {processes}: "
                "need more than 0, 512 for SymPy, and 1"
            )
        check_place(answer)
        self.key = key
        self.answer: AnswerPlace = answer
        self._same = SubprocessPool(
            f"{HERE}:same",
            SandboxLimits(timeout_s, memory_mib, allow_reading),
            prepare=f"{HERE}:load_library",
            processes=processes,
        )

    async def __call__(
        self, problem: Problem, completion: Completion, earned: Mapping[str, float]
    ) -> float:
        said = answer_in(completion, self.answer)
        if said is None:
            return 0.0
        if self.answer == "boxed":
            said = f"\\boxed{{{said}}}"
        right: Any = problem.answer[self.key] if self.key else problem.answer
        return float(await self._same(str(right), said))

    async def close(self) -> None:
        await self._same.close()


def load_library(right: str) -> None:
    """Prepare `same`."""
    import_library()


def import_library() -> None:
    """Import the library in the process that all calls are forked from, which takes a second."""
    importlib.import_module("math_verify")


def same(right: str, said: str) -> bool:
    """Whether a text states the right answer, which may be written in any way. The library's own
    time-outs are off, because the process that this runs in is ended from outside.
    """
    wanted = gold_math(half_width(right))
    said = half_width(said)
    if wanted is None:
        return False
    if closed_boxes(said) == [] and as_words(wanted) in map(as_words, said_words(said)):
        return True
    if not is_text(in_digits(wanted)):
        wanted = in_digits(wanted)
        said = in_digits(said)
    answer = stated_math(said)
    return answer is not None and equal(wanted, answer)


def gold_math(right: str) -> str | None:
    """The mathematics of a right answer: what follows its last `####`, what its last box holds,
    what is between its dollars, or all of it. None if there is none.
    """
    text = right.rpartition("####")[2].strip()
    boxes = closed_boxes(text)
    if boxes is None:
        return None
    if boxes:
        return in_box(text) or None
    formula = FORMULA.fullmatch(text)
    if formula:
        text = next(group for group in formula.groups() if group is not None)
    return text.strip() or None


def unequal_to_themselves(golds: Sequence[str]) -> list[int]:
    """The indexes of the right answers that the reward would not take for right, if a policy put
    exactly them into a box.
    """
    return [index for index, gold in enumerate(golds) if not _is_equal_to_itself(gold)]


def _is_equal_to_itself(gold: str) -> bool:
    wanted = gold_math(gold)
    if wanted is None or not is_usable(wanted):
        return False
    return same(gold, f"The answer is $\\boxed{{{wanted}}}$.")


async def unusable_golds(golds: Sequence[str], allow_reading: bool = False) -> dict[int, str]:
    """Why right answers cannot be used, by their index: the reward would not take them for right,
    or does not come to an end with them. Each different one is checked once, and numbers are fine.
    """
    indexes = dict[str, list[int]]()
    for index, gold in enumerate(golds):
        if not PLAIN_NUMBER.fullmatch(gold.strip()):
            indexes.setdefault(gold, []).append(index)
    different = [*indexes]
    processes = min(os.cpu_count() or 1, -(-len(different) // CHECKED_AT_ONCE))
    pool = SubprocessPool(
        f"{HERE}:unequal_to_themselves",
        SandboxLimits(CHECK_S, 2048, allow_reading),
        prepare=f"{HERE}:import_library",
        processes=max(1, processes),
    )

    async def check(chunk: list[str]) -> dict[str, str]:
        try:
            found = await pool(chunk)
        except (CallFailed, RuntimeError) as error:
            if len(chunk) == 1:
                return {chunk[0]: f"math-verify does not come to an end with it ({error})"}
            middle = len(chunk) // 2
            return {**await check(chunk[:middle]), **await check(chunk[middle:])}
        return {chunk[index]: "math-verify takes it for different from itself" for index in found}

    chunks = [
        different[start : start + CHECKED_AT_ONCE]
        for start in range(0, len(different), CHECKED_AT_ONCE)
    ]
    try:
        results = await asyncio.gather(*map(check, chunks))
    finally:
        await pool.close()
    return {
        index: cause
        for result in results
        for gold, cause in result.items()
        for index in indexes[gold]
    }
