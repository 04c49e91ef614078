"""A server of OpenEnv, by its own library, for tests: guess a number with hints. It knows nothing
of streamrl.

    python openenv_server.py PORT [DIES_AFTER]

After so many steps, of all episodes together, the whole server ends in the middle of one.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app

steps = itertools.count(1)
LIFE = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # steps; 0: it does not end


class Guess(Action):
    guess: str


class Hint(Observation):
    text: str


class Guessing(Environment[Guess, Hint, State]):
    """The first guess earns a quarter for a right last digit; the second the rest."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._guesses = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Hint:
        self._number = int(rest.get("number", 0))
        self._guesses = 0
        return Hint(text=f"{self._number // 2}+{self._number - self._number // 2}=")

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Hint:
        if next(steps) == LIFE:
            os._exit(1)
        self._guesses += 1
        guess = int(action.guess)
        if self._guesses == 1:
            reward = 0.25 if guess % 10 == self._number % 10 else 0.0
            said = "more" if guess < self._number else "not more"
            return Hint(text=said, reward=reward, done=False)
        reward = 1 / (1 + abs(guess - self._number))
        return Hint(text="over", reward=reward, done=True)

    @property
    def state(self) -> State:
        return State(episode_id="", step_count=self._guesses)


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
