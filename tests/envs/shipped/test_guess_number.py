"""Guessing a number: whole conversations with a policy that plays by a script."""

from __future__ import annotations

import pytest

from streamrl.envs.shipped.guess_number import GuessNumber, remaining_range
from tests.envs.talking import play, texts


def test_guessing_by_halves_finds_it_and_every_guess_is_worth_what_it_rules_out():
    env = GuessNumber(seed=1, lowest=0, highest=6, guesses=3)
    index = next(i for i in range(50) if env.problem(i).answer == 4)
    made = play("guess-number", {"highest": 6, "guesses": 3}, "3", "5", "4", problem=index)
    assert texts(made) == [
        ("assistant", "3"),
        ("user", ">"),
        ("assistant", "5"),
        ("user", "<"),
        ("assistant", "4"),
    ]
    # of 0..6: 3 leaves 4..6 (4 of 6 ruled out), 5 leaves 4 (2 of 6)
    assert [
        turn.rewards["narrowed"] for turn in made.turns if turn.logprobs is not None
    ] == pytest.approx([4 / 6, 2 / 6, 0])
    assert made.rewards == pytest.approx({"found": 1.0, "narrowed": 1.0}) and not made.truncated


def test_guesses_that_say_nothing_are_told_so_and_run_out():
    env = GuessNumber(seed=1, lowest=0, highest=6, guesses=3)
    index = next(i for i in range(50) if env.problem(i).answer == 4)
    made = play("guess-number", {"highest": 6, "guesses": 3}, "<", "3", "3", problem=index)
    assert texts(made)[1::2] == [("user", "?"), ("user", ">")] and made.rewards == pytest.approx(
        {"found": 0.0, "narrowed": 4 / 6}
    )


@pytest.mark.parametrize(
    ("guess", "range_"),
    [
        ("3", (4, 6)),
        ("5", (0, 4)),
        ("4", (4, 4)),
        ("0", (1, 6)),
        ("9", (0, 6)),
        ("x", (0, 6)),
        ("", (0, 6)),
    ],
)
def test_what_is_left_after_a_guess_when_it_is_4_of_0_to_6(guess: str, range_: tuple[int, int]):
    assert remaining_range(0, 6, 4, guess) == range_
