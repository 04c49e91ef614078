"""Coding: the policy writes a Python function, which is tested in a sandbox. Problems come from a
file, or are small ones that are made here.

With `attempts` above 1 it is a conversation: a program that fails some of the tests is answered
with what it printed and the numbers of those tests, and the policy tries again. It is not told what
a test expects.

A line of the file is JSON: {"prompt": "Write a Python function f(x) ...", "tests": ["assert f(1) ==
2", ...]}.
"""

from __future__ import annotations

import os
import random
from asyncio import Semaphore
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streamrl.envs.api import Completion, Message, MultiTurnEnv, Problem, RewardBreakdown
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.engine.time_limits import acquired
from streamrl.envs.sandbox import programs
from streamrl.envs.sandbox.limits import SandboxLimits, require_sandbox
from streamrl.envs.sandbox.programs import ProgramResult
from streamrl.envs.shipped.answers import AnswerPlace, check_place, read_answer
from streamrl.envs.shipped.cells import shown, text_in, value_of
from streamrl.envs.shipped.code_fences import program_in
from streamrl.envs.shipped.row_files import read_rows

TESTS = 4  # of a problem that is made here
SHOWN_OUTPUT = 2000  # characters of what a program printed: the last ones, which name the error
# What f(x) has to return: in words, and as a function of x and two numbers.
TASKS: dict[str, Callable[[int, int, int], int]] = {
    "x * {a} + {b}": lambda x, a, b: x * a + b,
    "the larger of x + {a} and {b} * x": lambda x, a, b: max(x + a, b * x),
    "the sum of all whole numbers from {a} to {a} + x": lambda x, a, b: sum(range(a, a + x + 1)),
    "the remainder of x + {a} divided by {b}": lambda x, a, b: (x + a) % b,
    "how many decimal digits x * {a} has": lambda x, a, b: len(str(x * a)),
}
# What the policy is told of a program that a limit has ended.
LIMIT_TEXTS = {
    "time": "It took too long. ",
    "memory": "It took too much memory. ",
    "output": "It printed too much. ",
}


class Coding(MultiTurnEnv):
    """The rewards are `passed`, the share of the tests that the last program passes, and `ran`,
    whether it ended by itself without an error.

    With `attempts` there is also `gained` at each turn: by how much its program passes more than
    the best one before it.

    `answer` is where the policy's program is read (`answers.py`): of what is there, the program is
    the blocks of Python (`code_fences.py`). A last answer that is cut off passes no test.
    """

    def __init__(
        self,
        seed: int,
        file: str = "",
        timeout_s: float = 5.0,
        memory_mib: int = 256,
        allow_reading: bool = False,
        attempts: int = 1,
        answer: AnswerPlace = "after-think",
    ) -> None:
        check_place(answer)
        if attempts < 1:
            raise ValueError(f"attempts is {attempts}; at least 1")
        if timeout_s <= 0 or memory_mib < 64:
            raise ValueError(
                f"timeout_s is {timeout_s:g}, memory_mib {memory_mib}; "
                "more than 0, and at least 64 for Python itself"
            )
        require_sandbox(allow_reading)
        self.seed = seed
        self.limits = SandboxLimits(timeout_s, memory_mib, allow_reading)
        self.attempts = attempts
        self.answer: AnswerPlace = answer
        self._problems = read(Path(file)) if file else []
        self._order = EpochOrder(seed, len(self._problems)) if file else None
        # more programs at once than processors would only time out
        self._free = Semaphore(os.cpu_count() or 1)

    def dataset_index(self, number: int) -> DatasetIndex | None:
        return self._order(number) if self._order else None

    def problem(self, number: int) -> Problem:
        posed = self.dataset_index(number)
        if posed:
            prompt, tests = self._problems[posed.problem]
        else:
            prompt, tests = self._made_here(number)
        return Problem([{"role": "user", "content": prompt}], tests)

    async def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
        """What is wrong with the last program; None if nothing is, or after the last attempt."""
        answers = [
            str(message["content"]) for message in messages if message["role"] == "assistant"
        ]
        if len(answers) >= self.attempts:
            return None
        outcome = await self._run(answers[-1], problem)
        if all(outcome.passed):
            return None
        return [{"role": "user", "content": feedback(outcome)}]

    async def rewards(self, problem: Problem, completion: Completion) -> RewardBreakdown:
        # The programs run again here, because a conversation keeps nothing but its messages.
        texts = [turn.text for turn in completion.turns] or [completion.text]
        outcomes = [await self._run(text, problem) for text in texts[:-1]]
        if completion.finished or completion.truncation == "turns":
            outcomes.append(await self._run(texts[-1], problem))
        else:
            outcomes.append(_nothing_passed(problem))
        best = 0.0
        share = 0.0
        gains: list[dict[str, float]] = []
        for outcome in outcomes:
            share = sum(outcome.passed) / len(outcome.passed)
            gains.append({"gained": max(share - best, 0.0)})
            best = max(best, share)
        return RewardBreakdown(
            rollout={"passed": share, "ran": float(outcomes[-1].end == "ok")},
            turns=gains if self.attempts > 1 else (),
            weights={"gained": 0.0},
        )

    def _made_here(self, number: int) -> tuple[str, list[str]]:
        """The prompt and the tests of a small problem."""
        draw = random.Random(f"code {self.seed} {number}")
        task = draw.choice([*TASKS])
        a = draw.randint(2, 9)
        b = draw.randint(2, 9)
        asked = task.format(a=a, b=b)
        prompt = f"Write a Python function f(x) that returns {asked}, for x of at least 0."
        inputs = draw.sample(range(50), TESTS)
        return prompt, [f"assert f({x}) == {TASKS[task](x, a, b)}" for x in inputs]

    async def _run(self, text: str, problem: Problem) -> ProgramResult:
        answer = read_answer(text, self.answer)
        if answer is None:
            return _nothing_passed(problem)
        async with acquired(self._free):
            return await programs.run(program_in(answer), problem.answer, self.limits)


def _nothing_passed(problem: Problem) -> ProgramResult:
    """The result of an answer that has no program."""
    return ProgramResult("error", [False] * len(problem.answer), "")


def feedback(outcome: ProgramResult) -> str:
    """What the policy is told of a program that failed."""
    failed = [str(number) for number, passed in enumerate(outcome.passed, 1) if not passed]
    printed = f"It printed:\n{outcome.output[-SHOWN_OUTPUT:]}\n" if outcome.output else ""
    return (
        f"{LIMIT_TEXTS.get(outcome.end, '')}{len(failed)} of {len(outcome.passed)} tests failed: "
        f"{', '.join(failed)}.\n{printed}Correct the program."
    )


def read(path: Path) -> list[tuple[str, list[str]]]:
    """The prompts and tests of a file. Raises ValueError, which names the lines that cannot be
    used.
    """
    return read_rows(path, "problems", _prompt_and_tests)


def _prompt_and_tests(line: int, row: Any) -> tuple[str, list[str]]:
    tests = value_of(row.get("tests"))
    if not isinstance(tests, list):
        raise ValueError(f"not a prompt with tests: 'tests' is {shown(tests)}, not a list")
    if not tests:
        raise ValueError("no tests")
    return text_in(row.get("prompt"), "prompt"), [text_in(test, "tests") for test in tests]
