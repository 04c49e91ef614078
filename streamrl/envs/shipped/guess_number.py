"""Guess the number: the policy names one, and hears whether the number is smaller `<` or larger
`>`, until it is found or it has no guess left.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from streamrl.envs.api import Answer, Earned, Message, Problem


class GuessNumber:
    """Rewards: `found`; and `narrowed`, at each turn, the share of the other numbers that the guess
    has ruled out.

    `narrowed` adds up to 1 when one number is left, however it came to that: a potential, so it
    changes which turns are credited and not which way of guessing is best (Ng, Harada, Russell
    1999).
    """

    def __init__(self, seed: int, lowest: int = 0, highest: int = 9, guesses: int = 4) -> None:
        if not 0 <= lowest < highest or guesses < 1:
            raise ValueError(
                f"lowest {lowest}, highest {highest}, guesses {guesses}: need 0 <= lowest < highest, and a guess"
            )
        self.seed, self.lowest, self.highest, self.guesses = seed, lowest, highest, guesses

    def problem(self, index: int) -> Problem:
        number = random.Random(f"guess {self.seed} {index}").randint(self.lowest, self.highest)
        return Problem([{"role": "user", "content": f"{self.lowest}-{self.highest}"}], number)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
        said = [str(message["content"]) for message in messages if message["role"] == "assistant"]
        if number_in(said[-1]) == problem.answer or len(said) >= self.guesses:
            return None
        return [{"role": "user", "content": hint(problem.answer, said[-1])}]

    def rewards(self, problem: Problem, answer: Answer) -> Earned:
        low, high = self.lowest, self.highest
        turns: list[dict[str, float]] = []
        for said in answer.said:
            before = high - low
            low, high = left(low, high, problem.answer, said.text)
            turns.append({"narrowed": (before - (high - low)) / (self.highest - self.lowest)})
        return Earned(
            {"found": float(answer.finished and number_in(answer.text) == problem.answer)}, turns
        )


def number_in(text: str) -> int | None:
    """The first number that is said; None when there is none."""
    found = re.search(r"[0-9]{1,18}", text)
    return int(found[0]) if found else None


def hint(number: int, guess: str) -> str:
    """`<`: the number is smaller than the guess, `>`: larger, `?`: that was no number."""
    said = number_in(guess)
    return "?" if said is None else "<" if number < said else ">"


def left(low: int, high: int, number: int, guess: str) -> tuple[int, int]:
    """The smallest and the largest that the number may still be, of `low` to `high`, after this
    guess.
    """
    said = number_in(guess)
    if said is None:
        return low, high
    if said == number:
        return number, number
    return (low, min(high, said - 1)) if number < said else (max(low, said + 1), high)
