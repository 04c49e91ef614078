"""A problem that an env poses, or fails to."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.engine.problems import ProblemError, make_problem


class Posing(SingleTurnEnv):
    """Poses what it is given, or raises it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def problem(self, number: int) -> Problem:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {}


def test_a_problem_that_cannot_be_posed_is_named():
    with pytest.raises(ProblemError, match="problem 12: KeyError: 'x'"):
        make_problem(Posing(KeyError("x")), 12)
    with pytest.raises(ProblemError, match="problem 12: TypeError: not a Problem but dict"):
        make_problem(Posing({"question": "47="}), 12)
    posed = Problem([{"role": "user", "content": "47="}])
    assert make_problem(Posing(posed), 12) is posed
