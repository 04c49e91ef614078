from collections import Counter

import pytest

from streamrl.run.orchestrator.plan import BROKER
from tests.chaos.known import role
from tests.chaos.plan import LONGEST_PAUSE_S, plan

PARTS = ["learner", "buffer", "batcher", "env-red-0", "env-blue-0"]


def test_a_hundred_kills_hit_every_role_and_the_broker_often_enough():
    made = plan(100, 7, PARTS)
    assert Counter(role(kill.part) for kill in made) == {
        "env": 22,
        "buffer": 22,
        "batcher": 22,
        "learner": 22,
        BROKER: 12,
    }
    assert sum(kill.inside for kill in made) == 62  # 0.7 of the 88 kills of parts
    assert not any(kill.inside for kill in made if kill.part == BROKER)


@pytest.mark.parametrize("kills", [1, 5, 10, 33])
def test_there_are_as_many_as_asked_for_and_the_broker_is_always_among_them(kills: int):
    made = plan(kills, 1, PARTS)
    roles = Counter(role(kill.part) for kill in made)
    assert len(made) == kills and roles.pop(BROKER) >= 1
    assert (
        max(roles.values(), default=0)
        - min((roles[name] for name in ("env", "buffer", "batcher", "learner")), default=0)
        <= 1
    )


def test_the_seed_decides():
    assert plan(50, 1, PARTS) == plan(50, 1, PARTS) != plan(50, 2, PARTS)
    assert {kill.part for kill in plan(50, 1, PARTS)} == {*PARTS, BROKER}
    assert all(0 <= kill.pause_s <= LONGEST_PAUSE_S for kill in plan(50, 1, PARTS))
