from __future__ import annotations

import asyncio

import pytest

from streamrl.envs.api import Completion, Problem
from streamrl.envs.engine.time_limits import with_time_limit
from streamrl.envs.sandbox.subprocess_call import CallFailed
from streamrl.envs.shipped.math_verify import MathVerify, gold_math, unusable_golds
from tests.support.waiting import patience

EQUAL = [
    ("\\frac{1}{2}", "so it is $0.5$"),
    ("1/2", "\\boxed{\\frac{2}{4}}"),
    ("42", "The answer is 42."),
    ("$x^2+2x+1$", "$(x+1)^2$"),
    ("12", "There are twelve."),
    ("72", r"\boxed{\text{seventy-two clips}}"),
    (r"\text{Three}", "3"),
]
DIFFERENT = [("42", "41"), ("42", "no idea"), ("1", "No one knows."), ("12", "The answer is two.")]


async def test_the_same_number_written_otherwise_is_right():
    verify = MathVerify(timeout_s=30.0)
    try:
        for right, said in (*EQUAL, *DIFFERENT):
            assert await verify(Problem([], right), Completion(said, True), {}) == (
                (right, said) in EQUAL
            ), (right, said)
    finally:
        await verify.close()


async def test_what_is_cut_off_or_left_open_is_wrong_without_a_call():
    verify = MathVerify()
    for text, is_finished in ((r"\boxed{42}", False), ("<think>It is 42", True)):
        assert await verify(Problem([], "42"), Completion(text, is_finished), {}) == 0.0


@pytest.mark.parametrize(
    ("right", "mathematics"),
    [
        ("She sold 24.\n#### 72", "72"),
        (r"So it is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("$x + 1$", "x + 1"),
        (r"3\sqrt{13}", r"3\sqrt{13}"),
        (r"\boxed{3", None),
        ("#### ", None),
    ],
)
def test_the_mathematics_of_a_right_answer(right: str, mathematics: str | None):
    assert gold_math(right) == mathematics


async def test_a_right_answer_that_is_not_equal_to_itself_is_found_by_its_index():
    golds = ["7", r"\frac{1}{2}", r"\boxed{3", "x^2", r"\boxed{3"]
    causes = await unusable_golds(golds)
    assert [*causes] == [2, 4]
    assert causes[2] == "math-verify takes it for different from itself"


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


async def test_a_right_answer_that_hangs_is_found_among_others():
    causes = await unusable_golds(["x", PATHOLOGICAL, "y"])
    assert [*causes] == [1]
    assert causes[1].startswith("math-verify does not come to an end with it")


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
