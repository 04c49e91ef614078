"""Simulated runs whose steps/s are known in closed form."""

from random import Random
from typing import Any

import msgspec
import pytest

from streamrl.config.run_file import RunFile
from streamrl.extensions.advisor import simulator
from streamrl.extensions.advisor.facts import (
    Call,
    Engine,
    Facts,
    SampledGroup,
    SampledRollout,
    Step,
)
from streamrl.extensions.advisor.simulator import draw_group, simulate
from tests.support.advice import (
    DEMONSTRATIONS,
    FACTS,
    PROMPT,
    SIZE,
    TOKENS,
    facts,
    group_of,
    run_of,
)


def rate(run: RunFile, known: Facts) -> float:
    outcome = simulate(run, known, steps=40, limit_s=1e4)
    assert outcome is not None
    return outcome.steps_per_s


def reward_of_index(group: SampledGroup) -> SampledGroup:
    """The group with another reward of each rollout."""
    rollouts = [
        msgspec.structs.replace(rollout, reward=float(index))
        for index, rollout in enumerate(group.rollouts)
    ]
    return SampledGroup(rollouts, group.end_s)


def test_a_slow_learner_makes_as_many_steps_as_it_has_time_for():
    known = facts(steps=[Step(train_s=10.0, publish_s=2.0, announce_s=1.0)])
    outcome = simulate(run_of(), known, steps=40, limit_s=1e4)
    assert outcome is not None
    assert outcome.steps_per_s == pytest.approx(1 / 12)
    assert outcome.trained_frac == pytest.approx(10 / 12, rel=0.02)


def test_a_learner_waits_for_the_announcement_of_the_version_before():
    known = facts(steps=[Step(train_s=1.0, publish_s=0.0, announce_s=10.0)])
    assert rate(run_of(), known) == pytest.approx(1 / 10)


@pytest.mark.parametrize("servers", [1, 2])
def test_full_servers_give_their_slots_over_the_time_of_a_token(servers: int):
    # 16 sequences of 40 tokens in 0.4 s, of which a batch has 32
    run = run_of(inference={"replicas": servers}, buffer={"max_age": 8}, batcher={"lookahead": 6})
    known = facts(steps=[Step(0.001, 0.0, 0.0)])
    assert rate(run, known) == pytest.approx(servers / 0.8, rel=0.05)


def test_one_thing_at_a_time_takes_the_sum_of_all_times():
    run = run_of(
        buffer={"max_age": 0},
        batcher={"lookahead": 0, "admission": "capacity"},
        inference={"max_num_seqs": 64},
    )
    known = facts(
        steps=[Step(train_s=0.5, publish_s=0.25, announce_s=0.2)],
        engines={"generation": Engine(0.1, 0.01, 0.001)},
        groups={"copy-digits": [group_of(*[TOKENS] * SIZE, end_s=0.05)]},
        hops_s=[0.03],
    )
    # version to batcher to env; group to buffer to batcher to learner
    hops_s = 5 * 0.03
    sampling_s = 0.1 + TOKENS * (0.01 + 0.001 * 32) + 0.05
    assert rate(run, known) == pytest.approx(1 / (hops_s + sampling_s + 0.5 + 0.2))


def test_what_an_env_waits_between_two_calls_is_waited_for():
    run = run_of(
        buffer={"max_age": 0},
        batcher={"lookahead": 0, "admission": "capacity"},
        inference={"max_num_seqs": 64},
    )
    calls = [Call(0.0, 20), Call(3.0, 20)]
    group = SampledGroup([SampledRollout(calls, TOKENS + PROMPT, 0.5)] * SIZE, 0.0)
    known = facts(groups={"copy-digits": [group]})
    assert rate(run, known) == pytest.approx(1 / (0.4 + 3.0 + 0.1), rel=0.01)


def test_rollouts_that_are_too_old_expire_and_a_higher_age_keeps_them():
    # One group of ten takes as long as about five steps.
    groups = [group_of(*[TOKENS] * SIZE)] * 9 + [group_of(*[6 * TOKENS] * SIZE)]
    settings: dict[str, dict[str, Any]] = {
        "batcher": {"total_token_budget": 8 * SIZE * (TOKENS + PROMPT), "max_seq_len": 512},
        "model": {"max_seq_len": 512},
        "inference": {"max_num_seqs": 256, "max_model_len": 512},
    }
    known = facts(groups={"copy-digits": groups}, steps=[Step(0.5, 0.0, 0.0)])
    young = simulate(run_of(**settings, buffer={"max_age": 2}), known, 40, 1e4)
    old = simulate(run_of(**settings, buffer={"max_age": 16}), known, 40, 1e4)
    assert young is not None and old is not None
    assert young.expired_frac > 0.05 and old.expired_frac == 0


def test_groups_that_train_nothing_are_sampled_and_filtered():
    flat = group_of(*[TOKENS] * SIZE)
    known = facts(groups={"copy-digits": [flat, reward_of_index(flat)]})
    kept = rate(run_of(buffer={"zero_advantage": "keep"}), known)
    filtered = rate(run_of(buffer={"zero_advantage": "filter"}), known)
    assert filtered == pytest.approx(kept / 2, rel=0.2)


def test_groups_without_calls_are_published_at_once_and_fill_their_share():
    # Half of a batch is of groups that take no time, and so it takes half as long.
    run = run_of(
        envs={"copy-digits": {"fraction": 0.5}, "shown": DEMONSTRATIONS},
        buffer={"max_age": 8, "zero_advantage": "filter"},
        batcher={"lookahead": 6},
    )
    sampled = [reward_of_index(group_of(*[TOKENS] * SIZE))]
    shown = SampledGroup([SampledRollout([], 50, 0.0)], 0.0)
    known = facts(groups={"copy-digits": sampled, "shown": [shown]}, steps=[Step(0.001, 0.0, 0.0)])
    assert rate(run, known) == pytest.approx(2 / 0.8, rel=0.05)


def test_groups_that_take_no_time_and_train_nothing_are_not_begun_forever(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(simulator, "MOST_GROUPS", 500)
    given = SampledGroup([SampledRollout([], 50, 0.0)] * SIZE, 0.0)
    run = run_of(buffer={"zero_advantage": "filter"}, batcher={"lookahead": 1})
    assert simulate(run, facts(groups={"copy-digits": [given]}), 10, 1e9) is None


def test_groups_that_fail_as_a_whole_are_begun_again():
    failed = SampledGroup([SampledRollout([], 0, 0.0)] * SIZE, 0.0)
    known = facts(groups={"copy-digits": [failed, group_of(*[TOKENS] * SIZE)]})
    assert rate(run_of(), known) > 0


def test_no_batch_waits_for_an_env_of_which_nothing_was_recorded():
    run = run_of(envs={"copy-digits": {"fraction": 0.5}, "add-digits": {"fraction": 0.5}})
    assert rate(run, FACTS) == pytest.approx(rate(run_of(), FACTS), rel=0.05)


def test_settings_that_allow_for_no_batch_give_no_outcome():
    run = run_of(batcher={"total_token_budget": TOKENS})
    assert simulate(run, FACTS, steps=10, limit_s=100.0) is None


def test_the_same_seed_gives_the_same_outcome():
    known = facts(groups={"copy-digits": [group_of(*range(5, 13)), group_of(*range(40, 48))]})
    outcomes = [simulate(run_of(), known, 20, 1e4, seed) for seed in (1, 1, 2)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_a_smaller_group_is_of_one_recorded_group_and_a_larger_one_of_its_neighbours():
    groups = [group_of(*[size] * 4) for size in (1, 2, 3, 90, 91, 92)]
    random = Random(0)
    for _ in range(20):
        few = [rollout.calls[0].tokens for rollout in draw_group(groups, 2, random).rollouts]
        assert len(few) == 2 and len(set(few)) == 1
        many = [rollout.calls[0].tokens for rollout in draw_group(groups, 8, random).rollouts]
        assert len(many) == 8
        assert len(draw_group(groups, 100, random).rollouts) == 100
