"""Code is run against the tests of its problem, once or in several attempts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Completion, Problem, RewardBreakdown
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.envs.shipped.coding import Coding
from streamrl.inference.clients.client import Client
from streamrl.stream.records import Rollout
from streamrl.system.errors import ConfigError
from tests.inference.stub import Stub
from tests.support.waiting import patience


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "f"}', ":1: not a prompt with tests"),
        ('{"prompt": "f", "tests": []}', ":1: no tests"),
        ('{"prompt": "f", "tests": ["a", {}]}', ":1: 'tests' is {}, not a text"),
        ('{"prompt": ["f"], "tests": ["a"]}', ":1: 'prompt' is .'f'., not a text"),
        (None, "cannot be read .No such file"),
    ],
)
def test_a_file_that_is_none_is_named(line: str | None, says: str, tmp_path: Path):
    file = tmp_path / "file.jsonl"
    if line is not None:
        file.write_text(line)
    with pytest.raises(ConfigError, match=f"^envs.x.params: coding refuses them.*{says}"):
        make_env("coding", 0, {"file": str(file)}, "envs.x")


RIGHT = {
    "x * ": "x * {a} + {b}",
    "the larger": "max(x + {a}, {b} * x)",
    "the sum": "sum(range({a}, {a} + x + 1))",
    "the remainder": "(x + {a}) % {b}",
    "how many": "len(str(x * {a}))",
}


def judged(env: Coding, problem: Problem, text: str) -> dict[str, float]:
    return dict(asyncio.run(env.rewards(problem, Completion(text, True))).rollout)


def test_code_is_run_against_the_tests_of_its_problem():
    env: Any = make_env("coding", 0, {}, "envs.x")
    problem = env.problem(0)._replace(
        answer=["assert f(1) == 5", "assert f(2) == 8", "assert f('a') == 'aaa2'"]
    )
    assert judged(
        env, problem, "So:\n```python\ndef f(x):\n    return 3 * x + 2\n```\nThat is it."
    ) == {"passed": 2 / 3, "ran": 1.0}
    assert judged(env, problem, "def f(x): return 5") == {"passed": 1 / 3, "ran": 1.0}
    assert judged(env, problem, "def f(x) return 5") == {"passed": 0.0, "ran": 0.0}
    assert judged(env, problem, "") == {"passed": 0.0, "ran": 1.0}


def test_its_own_problems_have_right_answers():
    env: Any = make_env("coding", 0, {}, "envs.x")
    seen = set[str]()
    for index in range(40):
        problem = env.problem(index)
        content = problem.messages[0]["content"]
        start = next(
            start
            for start in RIGHT
            if content.startswith(f"Write a Python function f(x) that returns {start}")
        )
        if start in seen:
            continue
        seen.add(start)
        # the last is "at least 0"
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in content).split()][:-1]
        a = numbers[0]
        b = numbers[-1]
        assert (
            judged(env, problem, f"def f(x): return {RIGHT[start].format(a=a, b=b)}")["passed"]
            == 1.0
        ), content
    assert seen == set(RIGHT)


def test_code_that_never_ends_is_over_in_time_and_does_not_stall_the_others():
    async def both() -> list[RewardBreakdown]:
        env = Coding(seed=0, timeout_s=1.0)
        problem = Problem([], ["assert f(1) == 1"])
        return await asyncio.gather(
            *[
                env.rewards(problem, Completion(text, True))
                for text in ("while True: pass", "def f(x): return x")
            ]
        )

    assert [earned.rollout for earned in asyncio.run(both())] == [
        {"passed": 0.0, "ran": 0.0},
        {"passed": 1.0, "ran": 1.0},
    ]


TRIES = (
    "def f(x): return 3 // (x - 1)",
    "def f(x): return 7",
    "```python\ndef f(x): return 3 * x + 1\n```",
    "never asked for",
)


class Coder(Stub):
    """A server whose policy says one after the other."""

    def choice(self, index: int) -> dict[str, Any]:
        turn = sum(path.endswith("/generate") for path, _ in self.asked) - 1
        return {**super().choice(index), "text": TRIES[turn]}


def test_a_program_that_fails_is_run_answered_with_its_failure_and_tried_again(tmp_path: Path):
    """Over HTTP: three attempts, of which none, the second test and both are right."""
    file = tmp_path / "problems.jsonl"
    file.write_text(
        json.dumps({"prompt": "Write f", "tests": ["assert f(1) == 4", "assert f(2) == 7"]})
    )
    env: Any = make_env(
        "coding", 0, {"file": str(file), "attempts": 4, "timeout_s": patience(5)}, "envs.x"
    )

    async def played() -> Rollout:
        client = Client()
        client.on_server("coder", server.record())
        try:
            settings = Env(
                max_tokens=200,
                max_turns=8,
                reward_weights={"gained": 1.0, "passed": 0.0, "ran": 0.0},
            )
            (made,) = await RolloutRunner(env, settings, client).run_group(
                Task("x", 0, "x-0", env.problem(0)), 1
            )
        finally:
            await client.close()
        return made

    with Coder("coder") as server:
        made = asyncio.run(played())
    assert not made.failure and not made.truncated, made
    first, second = (turn.message for turn in made.turns[2::2])
    assert [turn.role for turn in made.turns] == ["user", "assistant"] * 3 and [
        turn.message for turn in made.turns[1::2]
    ] == list(TRIES[:3])
    assert (
        first.startswith("2 of 2 tests failed: 1, 2.")
        and "ZeroDivisionError" in first
        and "line 1, in f" in first
    )
    assert second == "1 of 2 tests failed: 1.\nCorrect the program."
    # what a test expects is not told
    assert not any("== 4" in text or "== 7" in text for text in (first, second))
    assert made.rewards == {"passed": 1.0, "ran": 1.0, "gained": 1.0} and made.reward == 1.0
    assert [turn.reward for turn in made.turns[1::2]] == [None, 0.5, 0.5]


def test_the_last_attempt_is_not_answered():
    tests = ["assert f(1) == 5"]
    for attempts, replies in ((1, False), (2, True)):
        env = Coding(seed=0, attempts=attempts)
        said = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "def f(x): return 0"},
        ]
        assert bool(asyncio.run(env.reply(Problem([], tests), said))) == replies
