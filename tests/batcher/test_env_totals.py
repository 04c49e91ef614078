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
    env_totals = totals()
    assert env_totals.is_clearly_short
    env_totals.supply = {"a": 50, "b": 45}
    assert env_totals.is_clearly_short
    env_totals.supply = {"a": 50, "b": 46}
    # rounding may take a token of each share, and of the rest
    assert not env_totals.is_clearly_short


def test_an_attempt_is_hopeless_until_its_own_env_or_enough_of_others_has_come():
    env_totals = totals()
    assert not env_totals.retry_is_hopeless
    env_totals.on_attempt(Selection([], {"a": 3}, {}, {"a": 10}))
    env_totals.on_group("b", 10)
    assert env_totals.retry_is_hopeless
    env_totals.on_group("b", 1)
    assert not env_totals.retry_is_hopeless
    env_totals.on_attempt(Selection([], {"a": 3}, {}, {"a": 10}))
    env_totals.on_group("a", 1)
    assert not env_totals.retry_is_hopeless


def test_the_batches_to_come_can_take_what_an_env_is_owed_from_earlier_ones():
    env_totals = totals()  # work may begin for batch 0, of which each env has 50 tokens
    for owed, asked in ((50.0, 50.0), (70.0, 70.0), (30.0, 50.0)):
        env_totals.owed = {"a": owed}
        assert env_totals.asked_tokens("a") == asked
