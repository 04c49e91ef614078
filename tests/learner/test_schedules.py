from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

from streamrl.config.sections.learner import Learner, Schedule
from streamrl.learner.schedules import learning_rate


def rates(steps: int, **settings: Any) -> list[float]:
    schedule = learning_rate(Learner(learning_rate=8.0, **settings))
    return [float(schedule(step)) for step in range(steps)]


def test_after_the_warm_up_the_rate_stays():
    """From 8 / 4 on, by (8 - 2) / 4 a step."""
    assert rates(7, warmup_steps=4) == [2.0, 3.5, 5.0, 6.5, 8.0, 8.0, 8.0]
    assert rates(2, warmup_steps=0) == [8.0, 8.0]


def test_it_falls_in_a_line_and_stays_at_its_least():
    found = rates(8, schedule=Schedule(kind="linear", steps=6, min_ratio=0.5), warmup_steps=2)
    assert found == [4.0, 6.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]


def test_it_falls_as_half_a_cosine():
    """At p = 0, 1/4, 1/2, 3/4, 1: (1 + cos pi p) / 2 of the way from 2 to 8."""
    found = rates(8, schedule=Schedule(kind="cosine", steps=6, min_ratio=0.25), warmup_steps=2)
    half = 3 / np.sqrt(2)
    expected = [4.0, 6.0, 8.0, 5 + half, 5.0, 5 - half, 2.0, 2.0]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_constant_rate_is_that_of_runs_before_there_were_schedules():
    """Bit for bit, as their versions have to be computed again."""
    before = optax.linear_schedule(3e-4 / 10, 3e-4, 10)
    now = learning_rate(Learner(learning_rate=3e-4))
    assert [float(now(step)) for step in range(20)] == [float(before(step)) for step in range(20)]
