from dataclasses import replace

from streamrl.batcher.env_totals import EnvTotals
from streamrl.batcher.selection import Selection
from streamrl.batcher.state import BatcherState
from tests.support.batcher import CONFIG


def totals() -> EnvTotals:
    """Of two envs, each of which has half of a batch of 100 tokens."""
    config = replace(CONFIG, fractions={"a": 0.5, "b": 0.5}, total_token_budget=100)
    return EnvTotals(config, BatcherState())


def test_a_batch_is_clearly_short_until_there_are_nearly_its_tokens():
    found = totals()
    assert found.is_clearly_short
    found.supply = {"a": 50, "b": 45}
    assert found.is_clearly_short
    found.supply = {"a": 50, "b": 46}  # rounding may take a token of each share, and of the rest
    assert not found.is_clearly_short


def test_an_attempt_is_hopeless_until_its_own_env_or_enough_of_others_has_come():
    found = totals()
    assert not found.retry_is_hopeless
    found.on_attempt(Selection([], {"a": 3}, {}, {"a": 10}))
    found.on_group("b", 10)
    assert found.retry_is_hopeless
    found.on_group("b", 1)
    assert not found.retry_is_hopeless
    found.on_attempt(Selection([], {"a": 3}, {}, {"a": 10}))
    found.on_group("a", 1)
    assert not found.retry_is_hopeless
