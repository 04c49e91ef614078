"""Coding: a Python function is asked for, and tested in a sandbox. Problems come from a file, or
are small ones made here.

With `attempts` above 1 it is a conversation: a program that fails some of the tests is answered
with what it printed and the numbers of those tests, and the policy tries again. What a test expects
is not told.

A line of the file is JSON: {"prompt": "Write a Python function f(x) ...", "tests": ["assert f(1) ==
2", ...]}.
"""

from __future__ import annotations

import os
import random
import re
from asyncio import Semaphore
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from streamrl.envs.api import Answer, Earned, Message, Problem, Said
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.engine import turns
from streamrl.envs.sandbox import limits, programs
from streamrl.envs.sandbox.programs import Outcome
from streamrl.envs.shipped.samples import parsed

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
TESTS = 4
TOLD = 2000  # characters of what a program printed: the last ones name the error
NO_TOKENS = np.array([], np.uint16)
TASKS: dict[str, Callable[[int, int, int], int]] = {  # what f(x) is to be, of x and two numbers
    "x * {a} + {b}": lambda x, a, b: x * a + b,
    "the larger of x + {a} and {b} * x": lambda x, a, b: max(x + a, b * x),
    "the sum of all whole numbers from {a} to {a} + x": lambda x, a, b: sum(range(a, a + x + 1)),
    "the remainder of x + {a} divided by {b}": lambda x, a, b: (x + a) % b,
    "how many decimal digits x * {a} has": lambda x, a, b: len(str(x * a)),
}


class Coding:
    """Rewards: `passed`, the share of the tests that the last program passes; `ran`, that it ended
    by itself without an error.

    With `attempts`, `gained` too, at each turn: by how much its program passes more than the best
    one before it.
    """

    def __init__(
        self,
        seed: int,
        file: str = "",
        timeout_s: float = 5.0,
        memory_mib: int = 256,
        allow_reading: bool = False,
        attempts: int = 1,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts is {attempts}; at least 1")
        if timeout_s <= 0 or memory_mib < 64:
            raise ValueError(
                f"timeout_s is {timeout_s:g}, memory_mib {memory_mib}; more than 0, and at least 64 for Python itself"
            )
        limits.require_sandbox(allow_reading)
        self.seed, self.timeout_s, self.memory_mib = seed, timeout_s, memory_mib
        self.allow_reading, self.attempts = allow_reading, attempts
        self._problems = read(Path(file)) if file else []
        self._epochs = EpochOrder(seed, len(self._problems)) if file else None
        self._free = Semaphore(os.cpu_count() or 1)  # programs at once: more would only time out

    def dataset_index(self, index: int) -> DatasetIndex | None:
        return self._epochs(index) if self._epochs else None

    def problem(self, index: int) -> Problem:
        if place := self.dataset_index(index):
            prompt, tests = self._problems[place.problem]
            return Problem([{"role": "user", "content": prompt}], tests)
        draw = random.Random(f"code {self.seed} {index}")
        what, a, b = draw.choice([*TASKS]), draw.randint(2, 9), draw.randint(2, 9)
        prompt = f"Write a Python function f(x) that returns {what.format(a=a, b=b)}, for x of at least 0."
        return Problem(
            [{"role": "user", "content": prompt}],
            [f"assert f({x}) == {TASKS[what](x, a, b)}" for x in draw.sample(range(50), TESTS)],
        )

    async def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
        """What is wrong with the last program; None when nothing is, or it was the last attempt."""
        said = [str(message["content"]) for message in messages if message["role"] == "assistant"]
        if len(said) >= self.attempts:
            return None
        outcome = await self._run(said[-1], problem)
        return None if all(outcome.passed) else [{"role": "user", "content": told(outcome)}]

    async def rewards(self, problem: Problem, answer: Answer) -> Earned:
        # Programs run again here: a conversation keeps nothing but what was said.
        outcomes = [
            await self._run(said.text, problem)
            for said in answer.said or [Said(answer.text, NO_TOKENS)]
        ]
        shares = [sum(outcome.passed) / len(outcome.passed) for outcome in outcomes]
        best, gains = 0.0, list[dict[str, float]]()
        for share in shares:
            gains.append({"gained": max(share - best, 0.0)})
            best = max(best, share)
        earned = {"passed": shares[-1], "ran": float(outcomes[-1].end == "ok")}
        return Earned(earned, gains if self.attempts > 1 else (), weights={"gained": 0.0})

    async def _run(self, said: str, problem: Problem) -> Outcome:
        async with turns.turn(self._free):
            return await programs.run(
                program(said), problem.answer, self.timeout_s, self.memory_mib, self.allow_reading
            )


def told(outcome: Outcome) -> str:
    """What the policy is told of a program that failed."""
    failed = ", ".join(str(number) for number, passed in enumerate(outcome.passed, 1) if not passed)
    how = {
        "time": "It took too long. ",
        "memory": "It took too much memory. ",
        "output": "It printed too much. ",
    }.get(outcome.end, "")
    printed = f"It printed:\n{outcome.output[-TOLD:]}\n" if outcome.output else ""
    return f"{how}{len(outcome.passed) - sum(outcome.passed)} of {len(outcome.passed)} tests failed: {failed}.\n{printed}Correct the program."


def program(text: str) -> str:
    """The last fenced block of what was said, or all of it."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


def read(path: Path) -> list[tuple[str, list[str]]]:
    """Prompts and tests of a file. Raises ValueError that names the line."""
    found: list[tuple[str, list[str]]] = []
    for line, (prompt, tests) in parsed(
        path,
        "a prompt with tests",
        lambda data: (str(data["prompt"]), [str(test) for test in data["tests"]]),
    ):
        if not tests:
            raise ValueError(f"{path}:{line}: no tests")
        found.append((prompt, tests))
    if not found:
        raise ValueError(f"file {path} has no problems")
    return found
