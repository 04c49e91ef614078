"""Guess the number: the policy names a number and is told whether the one it looks for is smaller
`<` or larger `>`, until it has found it or has no guess left.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from streamrl.envs.api import Completion, Message, MultiTurnEnv, Problem, RewardBreakdown
from streamrl.envs.sessions.thoughts import after_thoughts


class GuessNumber(MultiTurnEnv):
    """The rewards are `found` and, at each turn, `narrowed`: the share of the other numbers that
    the guess has ruled out.

    `narrowed` adds up to 1 once one number is left, whatever the guesses were. It is a potential:
    it changes which turns are credited, and not which way of guessing is best (Ng, Harada, Russell
    1999).
    """

    def __init__(self, seed: int, lowest: int = 0, highest: int = 9, guesses: int = 4) -> None:
        if not 0 <= lowest < highest or guesses < 1:
            raise ValueError(
                f"lowest {lowest}, highest {highest}, guesses {guesses}: "
                "need 0 <= lowest < highest, and a guess"
            )
        self.seed = seed
        self.lowest = lowest
        self.highest = highest
        self.guesses = guesses

    def problem(self, number: int) -> Problem:
        secret = random.Random(f"guess {self.seed} {number}").randint(self.lowest, self.highest)
        return Problem([{"role": "user", "content": f"{self.lowest}-{self.highest}"}], secret)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
        answers = [
            str(message["content"]) for message in messages if message["role"] == "assistant"
        ]
        if number_in(answers[-1]) == problem.answer or len(answers) >= self.guesses:
            return None
        return [{"role": "user", "content": hint(problem.answer, answers[-1])}]

    def rewards(self, problem: Problem, completion: Completion) -> RewardBreakdown:
        low = self.lowest
        high = self.highest
        turns: list[dict[str, float]] = []
        for turn in completion.turns:
            before = high - low
            low, high = remaining_range(low, high, problem.answer, turn.text)
            ruled_out = before - (high - low)
            turns.append({"narrowed": ruled_out / (self.highest - self.lowest)})
        is_right = completion.finished and number_in(completion.text) == problem.answer
        return RewardBreakdown({"found": float(is_right)}, turns)


def number_in(text: str) -> int | None:
    """The first number after the thoughts of a text; None if there is none."""
    match = re.search(r"[0-9]{1,18}", after_thoughts(text) or "")
    return int(match[0]) if match else None


def hint(number: int, guess: str) -> str:
    """`<` if the number is smaller than the guess, `>` if it is larger, `?` if the guess is not a
    number.
    """
    guessed = number_in(guess)
    if guessed is None:
        return "?"
    return "<" if number < guessed else ">"


def remaining_range(low: int, high: int, number: int, guess: str) -> tuple[int, int]:
    """The smallest and the largest value that the number may still have after this guess, if it was
    in `low` to `high` before.
    """
    guessed = number_in(guess)
    if guessed is None:
        return low, high
    if guessed == number:
        return number, number
    if number < guessed:
        return low, min(high, guessed - 1)
    return max(low, guessed + 1), high
