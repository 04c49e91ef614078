from streamrl.batcher.settings import batcher_config
from streamrl.batcher.state import BatcherState
from streamrl.extensions.advisor.simulated_batcher import SimulatedBatcher, SimulatedGroup
from tests.support.advice import run_of

GROUP_TOKENS = 400  # a batch has 1,600


def group(tokens: int = GROUP_TOKENS, oldest: int = 0, newest: int = 0) -> SimulatedGroup:
    return SimulatedGroup("copy-digits", "copy-digits-0", tokens, tokens, oldest, newest)


def test_a_batch_is_built_of_the_groups_that_fill_it_and_the_rest_is_asked_for():
    config = batcher_config(run_of())
    state = BatcherState()
    first = SimulatedBatcher(config, state, 0.0)
    first.on_policy_version(0)
    wanted = [demand.wanted_tokens for demand in first.finish()]
    assert wanted == [4 * 1600]  # of batches 0 to 3: lookahead is 2

    groups = [group() for _ in range(5)]
    step = SimulatedBatcher(config, state, 1.0)
    for each in groups:
        step.on_simulated_group(each)
    demands = step.finish()
    assert step.built == [groups[:4]] and state.next_batch == 1
    assert step.ended == [("batched", each) for each in groups[:4]]
    assert [demand.wanted_tokens for demand in demands] == [3 * 1600 - GROUP_TOKENS]
    assert demands[0].closed_groups == {"copy-digits-0": 5}


def test_what_is_too_old_expires_what_is_too_large_is_filtered_and_the_empty_is_counted():
    config = batcher_config(run_of(buffer={"max_age": 2}))
    state = BatcherState(version=9, next_batch=9)
    step = SimulatedBatcher(config, state, 0.0)
    old = group(oldest=6, newest=9)
    large = group(tokens=1601, oldest=9, newest=9)
    for each in (old, large, group(tokens=0)):
        step.on_simulated_group(each)
    demands = step.finish()
    assert step.built == [] and step.ended == [("expired", old), ("filtered", large)]
    assert demands[0].closed_groups == {"copy-digits-0": 3} and demands[0].held_tokens == 0


def test_a_group_of_a_version_that_is_not_announced_yet_waits_for_it():
    config = batcher_config(run_of())
    state = BatcherState(version=0)
    step = SimulatedBatcher(config, state, 0.0)
    for _ in range(4):
        step.on_simulated_group(group(oldest=1, newest=1))
    step.finish()
    assert step.built == []
    later = SimulatedBatcher(config, state, 1.0)
    later.on_policy_version(1)
    later.finish()
    assert len(later.built) == 1
