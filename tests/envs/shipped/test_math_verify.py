from __future__ import annotations

import asyncio

import pytest

from streamrl.envs.api import Completion, Problem
from streamrl.envs.engine.time_limits import with_time_limit
from streamrl.envs.sandbox.subprocess_call import CallFailed
from streamrl.envs.shipped.math_verify import MathVerify
from tests.support.waiting import patience

EQUAL = [
    ("\\frac{1}{2}", "so it is $0.5$"),
    ("1/2", "\\boxed{\\frac{2}{4}}"),
    ("42", "The answer is 42."),
    ("$x^2+2x+1$", "$(x+1)^2$"),
]


DIFFERENT = [("42", "41"), ("42", "no idea")]


async def test_the_same_number_written_otherwise_is_right():
    verify = MathVerify(timeout_s=30.0)
    try:
        for right, said in (*EQUAL, *DIFFERENT):
            assert await verify(Problem([], right), Completion(said, True), {}) == (
                (right, said) in EQUAL
            ), (right, said)
    finally:
        await verify.close()


PATHOLOGICAL = "$" + "9^{" * 6 + "9" + "}" * 6 + "$"


async def test_pathological_latex_is_no_verdict_stalls_nobody_and_goes_on():
    verify = MathVerify(timeout_s=patience(6.0), key="gt_answer")
    problem = Problem([], {"gt_answer": "42"})
    try:
        assert await verify(problem, Completion("$\\frac{84}{2}$", True), {}) == 1.0
        ticks = 0
        judging = asyncio.create_task(verify(problem, Completion(PATHOLOGICAL, True), {}))
        while not judging.done():
            await asyncio.sleep(0.05)
            ticks += 1
        # a verdict that nobody has reached is no 0
        with pytest.raises((CallFailed, RuntimeError), match="took longer than|MemoryError"):
            await judging
        assert ticks >= 3
        assert await verify(problem, Completion("42", True), {}) == 1.0
    finally:
        await verify.close()


async def test_answers_that_queue_for_a_process_are_not_late_for_it():
    """One process, twelve answers at once, and a limit that they keep one by one and not all
    together: nobody fails for the queue.
    """
    verify = MathVerify(processes=1)
    limit_s = patience(0.5)

    async def slow(right: str, said: str) -> bool:
        await asyncio.sleep(limit_s / 5)
        return right == said

    verify._same._idle.get_nowait()
    verify._same._idle.put_nowait(slow)  # type: ignore[arg-type]  # in the place of the process: as slow as is wanted
    judged = [
        with_time_limit(
            verify(Problem([], "42"), Completion("42", True), {}), limit_s, "its reward"
        )
        for _ in range(12)
    ]
    assert await asyncio.gather(*judged) == [1.0] * 12
