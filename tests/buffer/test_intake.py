"""Rollouts that can be read and not be used, each with the words that it is put aside with."""

from __future__ import annotations

import pytest

from streamrl.buffer.intake import objection
from streamrl.buffer.process import State, step
from streamrl.records import Fate, Metric, Rollout
from streamrl.stream.log import Event
from tests.buffer.test_process import CONFIG
from tests.build import rollout, turns, version_event


def why(record: Rollout, key: str = "g0", vocab_size: int = 0) -> str:
    return objection(record, key, "copy", 8, vocab_size)


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (rollout("nowhere"), "rollout says environment 'nowhere' but lies in rollouts.copy"),
        (rollout(version=1, newest=9), "policy version 9 is further ahead than 8: nobody has announced it"),
        (rollout(reward=-2e18), "a reward is larger than 1e+18: its group could not be scored"),
        (rollout(rewards={"style": 1e200}), "a reward is larger than 1e+18: its group could not be scored"),
        (rollout(temperature=1e-50), "temperature 1e-50 is not within 1e-06 and 1e+06"),
        (rollout(temperature=1e300), "temperature 1e+300 is not within 1e-06 and 1e+06"),
        (rollout(turns=turns(top_p=0.9)), "sampled with top_p 0.9 and top_k -1: the learner reproduces temperature only"),
    ],
)
def test_what_is_wrong_with_it(record: Rollout, cause: str):
    assert why(record).startswith(cause)


def test_a_key_that_is_not_the_group():
    assert why(rollout(), "g1").startswith("key 'g1' is not the rollout's group_id 'g0'")


def test_a_token_beyond_the_vocabulary():
    assert why(rollout(turns=turns(response=(3, 5))), vocab_size=5) == "token id 5 is not in the policy's vocabulary of 5"
    assert why(rollout(turns=turns(response=(3, 4))), vocab_size=5) == ""


def test_a_good_one():
    assert why(rollout(reward=-1e18, temperature=0.7, version=8)) == ""


@pytest.mark.parametrize("fields", [{"reward": 1e300}, {"reward": 3e38}, {"rewards": {"x": 1e200}}, {"temperature": 1e-320}])
def test_numbers_that_arithmetic_does_not_bear_stop_nothing(fields: dict[str, object]):
    """A group with such a reward could not be scored, and the next version's metrics not be made: the part would die of it, at every start."""
    records = [rollout(sample=0, **fields), rollout(sample=1), rollout(sample=2)]
    events = [version_event(0), *(Event("rollouts.copy", 0, i, "g0", record) for i, record in enumerate(records)), version_event(1)]
    _, outputs = step(CONFIG, State(), events, 0.0)
    assert next(o.record.fate for o in outputs if isinstance(o.record, Fate)) == "invalid"
    assert any(isinstance(o.record, Metric) for o in outputs)
