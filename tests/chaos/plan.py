"""Whom to kill, and when, drawn from a seed: the roles in turn, the broker now and then, most of it
inside open transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from streamrl.run.orchestrator.plan import BROKER
from tests.chaos.known import role

BROKER_FRAC = 0.12  # of all kills
INSIDE_FRAC = 0.7  # of the kills of parts
LONGEST_PAUSE_S = 0.5


class Kill(NamedTuple):
    part: str  # its name, or BROKER
    inside: bool  # only while it has a transaction open; else at any moment
    pause_s: float  # after it has committed in its present life


def plan(kills: int, seed: int, parts: Sequence[str]) -> list[Kill]:
    """So many kills, every role its even share, in a random order."""
    draw = Random(seed)
    brokers = max(round(kills * BROKER_FRAC), 1)
    roles = sorted({role(part) for part in parts})
    victims = [
        draw.choice([part for part in parts if role(part) == roles[i % len(roles)]])
        for i in range(kills - brokers)
    ]
    inside = [i < round(len(victims) * INSIDE_FRAC) for i in range(len(victims))]
    draw.shuffle(inside)
    chosen = [*zip(victims, inside, strict=True), *[(BROKER, False)] * brokers]
    draw.shuffle(chosen)
    return [Kill(part, within, draw.uniform(0, LONGEST_PAUSE_S)) for part, within in chosen]
