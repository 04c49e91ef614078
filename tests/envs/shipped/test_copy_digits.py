"""Copying digits: rewards worked by hand."""

from __future__ import annotations

import pytest

from streamrl.envs.api import Completion
from streamrl.envs.catalog import make_env


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [
        ("47", True, 1.0),
        ("47", False, 2 / 3),
        ("4", True, 1 / 3),
        ("74", True, 1 / 3),
        ("4<pad>", True, 2 / 3),
        ("477", True, 2 / 3),
        ("", True, 0.0),
    ],
)
def test_copying_is_rewarded_by_positions_the_end_among_them(
    text: str, finished: bool, reward: float
):
    env = make_env("copy-digits", 0, {"digits": 2}, "envs.x")
    problem = env.problem(0)._replace(answer="47")
    assert env.rewards(problem, Completion(text, finished)) == {"positions": pytest.approx(reward)}
