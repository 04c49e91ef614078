"""What is said of the rollouts that came in, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.buffer.stats import IntakeStats, RunningStats
from streamrl.stream.records import Metric
from streamrl.stream.records.limits import MAX_REWARD_NAMES
from tests.support.buffer import CONFIG, step_once
from tests.support.build import rollout, rollout_event, version_event


def test_the_metrics_of_what_came_in():
    # two rollouts of 2 + 3 tokens, rewards 1 and 0.5, one truncated; one failed
    records = [
        rollout(sample=0, reward=1.0, truncated=True),
        rollout(sample=1, reward=0.5),
        rollout(group="g1", failure="x"),
    ]
    out = step_once(
        [version_event(0), *(rollout_event(i, r) for i, r in enumerate(records)), version_event(1)]
    )
    (metric,) = [o.record for o in out if isinstance(o.record, Metric)]
    assert metric.step == 1
    assert metric.values == {
        "replays/copy/new_rollouts": 2,
        "replays/copy/new_tokens": 10,
        "replays/copy/new_generated_tokens": 6,
        "replays/copy/frac_truncated": 0.5,
        "replays/copy/new_failed": 1,
        "replays/copy/zero_advantage_groups": 0,
        "replays/copy/new_misaligned": 0,
        "replays/copy/suspicious_logprobs": 0,
        "replays/copy/reward/mean": 0.75,
        "replays/copy/reward/std": 0.25,
        "replays/copy/rewards/exact/mean": 0.75,
        "replays/copy/rewards/exact/std": 0.25,
    }


def test_what_came_in_from_all_envs_is_one_record_a_version():
    records = [rollout(env, env, failure="x") for env in ("copy", "add")]
    events = [rollout_event(i, record) for i, record in enumerate(records)]
    out = step_once(
        [version_event(0), *events, version_event(1)], replace(CONFIG, envs=("copy", "add"))
    )
    (metric,) = [o.record for o in out if isinstance(o.record, Metric)]
    assert {name: value for name, value in metric.values.items() if "failed" in name} == {
        "replays/copy/new_failed": 1,
        "replays/add/new_failed": 1,
    }


def test_mean_and_deviation_are_those_of_the_population():
    """1, 2 and 6: mean 3, and (4 + 1 + 9) / 3 for the variance."""
    stats = RunningStats()
    assert (stats.mean, stats.std) == (0.0, 0.0)
    for value in (1.0, 2.0, 6.0):
        stats.add(value)
    assert stats.mean == 3.0
    assert stats.std == pytest.approx((14 / 3) ** 0.5)


def test_a_rollout_that_failed_or_was_misaligned_has_no_reward_and_no_tokens():
    stats = IntakeStats()
    stats.add(rollout(failure="gone"), 5)
    stats.add(rollout(misaligned="token 3"), 5)
    assert (stats.failed, stats.misaligned, stats.rollouts, stats.tokens) == (1, 1, 0, 0)
    assert not any("reward/" in name for name in stats.metrics("copy"))
    assert stats.metrics("copy")["replays/copy/frac_truncated"] == 0.0


def test_an_env_that_makes_up_names_of_rewards_has_so_many_of_them():
    stats = IntakeStats()
    for number in range(MAX_REWARD_NAMES + 1):
        stats.add(rollout(rewards={f"r{number}": 1.0}), 5)
    assert len(stats.rewards) == MAX_REWARD_NAMES and stats.rollouts == MAX_REWARD_NAMES + 1
