import pytest

from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.run_history import (
    EDGE_BATCHES,
    EVALUATIONS,
    MixedVersions,
    Rewards,
    RunHistory,
)
from streamrl.stream.records import Metric
from tests.support.build import evaluation


def test_the_first_and_the_last_rewards_are_kept_and_the_curve_is_smooth():
    rewards = Rewards(None)
    for batch in range(30):
        rewards.add(batch, float(batch), float(batch))
    assert rewards.first == list(range(EDGE_BATCHES)) and rewards.last == list(range(10, 30))
    point = rewards.curve[-1]
    assert (point.batch, point.reward, point.smooth) == (29, 29.0, pytest.approx(19.5))


def test_a_target_counts_from_the_batch_that_reached_it():
    rewards = Rewards(Target(env="copy", reward=0.5, batches=2))
    for batch, reward in enumerate([0.9, 0.0, 0.6, 0.5, 0.0]):
        rewards.add(batch, 10.0 * batch, reward)
    assert rewards.reached_s == 30.0


def test_a_batch_that_is_measured_twice_counts_once():
    mixed = MixedVersions()
    for share in (1.0, 2.0):
        mixed.add(7, share, 4.0)
    assert (mixed.mixed, mixed.rollouts) == (2.0, 4.0)


def test_only_a_share_of_rollouts_that_can_be_is_added():
    history = RunHistory()
    for used in (4.0, -1.0, 2.0**53):
        values = {"batches/copy/mixed_versions_frac": 0.5, "batches/copy/rollouts_used": used}
        history.add_metric(Metric(source="batcher", time_s=1.0, values=values, step=int(used)))
    assert history.mixed["copy"].rollouts == 4.0


def test_of_many_evaluations_every_second_is_dropped_but_not_the_ends():
    history = RunHistory()
    for version in range(EVALUATIONS + 1):
        history.add_evaluation(evaluation(version=version))
    kept = sorted(history.evals["held"])
    assert kept[:3] == [0, 2, 4] and kept[-1] == EVALUATIONS and len(kept) == EVALUATIONS // 2 + 1
