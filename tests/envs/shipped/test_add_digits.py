"""Adding digits: rewards worked by hand."""

from __future__ import annotations

import pytest

from streamrl.envs.api import Completion
from streamrl.envs.catalog import make_env


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [("1", True, 1.0), ("1", False, 0.5), ("2", True, 0.5), ("11", True, 0.5)],
)
def test_adding_is_rewarded_for_the_last_digit_and_the_end(
    text: str, finished: bool, reward: float
):
    env = make_env("add-digits", 0, {}, "envs.x")
    problem = env.problem(0)
    first, second = (int(c) for c in problem.messages[0]["content"] if c.isdigit())
    assert problem.answer == str((first + second) % 10)
    assert env.rewards(problem._replace(answer="1"), Completion(text, finished)) == {
        "positions": reward
    }
