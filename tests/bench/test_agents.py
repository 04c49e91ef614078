"""The sizes that bench/agents.py prints, of a vocabulary of 150,000."""

from __future__ import annotations

from bench.agents import SHAPES, measure

KEPT, CUT = (measure(shape, 150_000) for shape in SHAPES.values())


def test_a_rewritten_history_costs_what_is_new_in_it():
    assert KEPT["tokens"] == 21_300 and CUT["tokens"] == 198_000
    assert KEPT["all"] < CUT["all"] < 350_000
    # a turn's 100 kept tokens are new after the fork, of three bytes each
    assert abs(CUT["rollouts"] - KEPT["rollouts"] - 19 * 100 * 3) < 1_000


def test_a_group_has_the_prompt_of_its_rollouts_once():
    assert KEPT["rollouts"] - KEPT["groups"] > 2_000 * 3 * 7 / 8
