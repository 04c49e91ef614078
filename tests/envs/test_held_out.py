"""Which problems are kept for evaluation, and that training poses nothing that says the same."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.held_out import (
    first_distinct,
    held_out_fingerprints,
    make_eval_env,
    possible_fingerprints,
    problem_fingerprint,
    select_held_out,
    text_fingerprint,
)
from streamrl.envs.shipped.copy_digits import CopyDigits
from streamrl.stream.records import Turn
from streamrl.system.errors import ConfigError
from tests.support.build import tokens


class Few(SingleTurnEnv):
    """Ten problems, each under every tenth number; number 3 cannot be posed."""

    def __init__(self, seed: int = 0) -> None: ...

    def problem(self, number: int) -> Problem:
        if number == 3:
            raise KeyError("three")
        return Problem([{"role": "user", "content": f"{number % 10}="}])

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {}


def run_file(**evaluations: dict[str, Any]) -> RunFile:
    return parse(
        {
            "run": "r",
            "envs": {"copy-digits": {"params": {"digits": 2}}, "add-digits": {}},
            "eval": {"envs": evaluations},
        }
    )


def numbers(count: int, exclude: tuple[bytes, ...] = ()) -> list[int]:
    return [held.number for held in first_distinct(Few(), count, exclude)]


def test_the_first_different_problems_are_kept():
    assert numbers(4) == [0, 1, 2, 4]
    assert numbers(4, (text_fingerprint("0="), text_fingerprint("4="))) == [1, 2, 5, 6]


def test_one_that_comes_later_is_found_there_and_there_are_no_more_than_there_are():
    assert numbers(10) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 13] == numbers(11)


def test_a_problem_is_what_it_says():
    one, other = (Problem([{"role": "user", "content": text}]) for text in ("47=", "48="))
    assert (
        problem_fingerprint(one)
        == text_fingerprint("47=")
        == problem_fingerprint(Problem([{"role": "system", "content": "47="}]))
        != problem_fingerprint(other)
    )
    assert possible_fingerprints(Turn(message="47=", role="user", tokens=tokens(1, 8, 11))) == [
        problem_fingerprint(one),
        problem_fingerprint(Problem([], tokens=[1, 8, 11])),
    ]
    assert (
        problem_fingerprint(Problem([], tokens=[1, 8]))
        != problem_fingerprint(Problem([], tokens=[1, 8, 11]))
        != problem_fingerprint(Problem([]))
    )


def test_all_evaluations_of_an_env_are_kept_from_it_and_from_no_other():
    run = run_file(
        **{
            "copy-digits": {"problems": 5},
            "again": {"env": "copy-digits", "seed": 9, "problems": 7, "params": {"digits": 3}},
        }
    )
    marks = held_out_fingerprints(run, "copy-digits")
    assert len(marks) == 12 and held_out_fingerprints(run, "add-digits") == frozenset()
    two = CopyDigits(0, 2)
    three = CopyDigits(9, 3)
    assert (
        problem_fingerprint(two.problem(0)) in marks
        and problem_fingerprint(three.problem(0)) in marks
    )


def test_too_few_problems_are_said():
    run = run_file(**{"copy-digits": {"problems": 11, "params": {"digits": 1}}})
    with pytest.raises(
        ConfigError,
        match=(
            r"^eval.envs.copy-digits.problems is 11, but the env has 10 different ones; lower it$"
        ),
    ):
        held_out_fingerprints(run, "copy-digits")
    with pytest.raises(
        ConfigError, match=r"the env has 9 different ones that training has not posed; lower it$"
    ):
        select_held_out(
            run, "copy-digits", make_eval_env(run, "copy-digits"), {text_fingerprint("7=")}
        )
