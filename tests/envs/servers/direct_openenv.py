"""Plays the env of `openenv_server.py` directly, without a server, a client or streamrl, and prints
the reward of each episode.

    python direct_openenv.py EPISODES
"""

from __future__ import annotations

import json
import sys

from answers import said
from openenv_server import Guess, Guessing


def reward_of(number: int) -> float:
    env = Guessing()
    question = env.reset(number=number).text
    total = 0.0
    for turn in (1, 2):
        total += float(env.step(Guess(guess=said(question, turn))).reward or 0.0)
    return total


if __name__ == "__main__":
    episodes = int(sys.argv[1])
    sys.argv = sys.argv[:1]
    print(json.dumps([reward_of(number) for number in range(episodes)]))
