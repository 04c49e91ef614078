"""What a group becomes when it closes: 2 rollouts a group, at least 2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streamrl.buffer import closing
from streamrl.buffer.closing import ClosedGroup, closed_group, size_bound
from streamrl.buffer.report import report
from streamrl.buffer.state import BufferConfig, OpenGroup
from streamrl.stream.log import chunks
from streamrl.stream.records import LossWeights
from tests.support.buffer import CONFIG, advance, fates, groups
from tests.support.build import rollout, rollout_event, turns, version_event


def closed(*rewards: float, config: BufferConfig = CONFIG) -> ClosedGroup:
    """Of a group g0 of env copy, whose members earned these rewards."""
    members = [
        rollout_event(i, rollout(sample=i, reward=reward)) for i, reward in enumerate(rewards)
    ]
    group = OpenGroup(
        opened=0, problem_id="p", producer="copy-7", partition=3, epoch=2, members=members
    )
    return closed_group("copy", "g0", group, config)


def test_rewards_1_and_0_are_scored_against_each_other():
    record, cause, has_zero_advantage, is_unscored = closed(1.0, 0.0)
    assert record.uids == ["g0-0", "g0-1"] and record.advantages.tolist() == [1.0, -1.0]
    assert (cause, has_zero_advantage, is_unscored) == ("", False, False)


def test_the_record_has_the_producer_of_the_group_and_not_that_of_its_first_member():
    assert closed(1.0, 0.0).record.producer == "copy-7"


def test_a_group_below_its_minimum_is_empty_and_keeps_what_its_producer_needs():
    record, cause, _, _ = closed(1.0)
    assert cause == "group below its minimum size" and record.uids == []
    assert (record.environment, record.group_id, record.problem_id) == ("copy", "g0", "p")
    assert (record.producer, record.partition, record.epoch) == ("copy-7", 3, 2)
    assert record.prompt_length == record.lengths.size == record.offsets.size == 0


@pytest.mark.parametrize(("over", "uids"), [(0, ["g0-0", "g0-1"]), (1, [])])
def test_a_record_of_its_topics_limit_is_published_and_one_of_a_byte_more_is_empty(
    over: int, uids: list[str], monkeypatch: pytest.MonkeyPatch
):
    # of each rollout 5 tokens of 2 bytes and 3 logprobs of 4
    size = size_bound(closed(1.0, 0.0).record) + 2 * (5 * 2 + 3 * 4)
    monkeypatch.setattr(closing, "record_limit", lambda topic: size - over)
    assert closed(1.0, 0.0).record.uids == uids


@pytest.mark.parametrize(
    ("zero_advantage", "uids", "cause"),
    [("keep", ["g0-0", "g0-1"], ""), ("filter", [], "group whose advantages are all 0")],
)
def test_a_group_of_equal_rewards_is_flat(zero_advantage: str, uids: list[str], cause: str):
    config = replace(CONFIG, zero_advantage=zero_advantage)
    flat = closed(1.0, 1.0, config=config)
    assert (flat.record.uids, flat.cause, flat.has_zero_advantage) == (uids, cause, True)


def raises(rewards: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError(f"of {object()}")


def a_list(rewards: np.ndarray) -> np.ndarray:
    return rewards.tolist()


def infinite(rewards: np.ndarray) -> np.ndarray:
    return rewards / np.float32(0)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raises", "the group cannot be scored: ZeroDivisionError: of <object object at 0x...>"),
        (
            "a_list",
            "the group cannot be scored: AttributeError: 'list' object has no attribute 'shape'",
        ),
        (
            "infinite",
            (
                "the group cannot be scored: ValueError: group g0: the advantage function returned"
                " array([inf, inf]"
            ),
        ),
    ],
)
def test_an_advantage_function_that_cannot_score_a_group_ends_the_group_and_not_the_buffer(
    name: str, cause: str
):
    config = replace(CONFIG, advantage=f"{__name__}:{name}")
    state, out = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i, reward=1.0)) for i in range(2))],
        config,
    )
    (fate,) = fates(out)
    assert (
        fate[:2] == ("filtered", [0, 1]) and fate[2].startswith(cause) and groups(out)[0].uids == []
    )
    assert report(config, state, 0.0).warnings == (f"copy: {fate[2]}",)


def test_a_group_whose_record_would_be_too_large_is_filtered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "RECORD_BYTES", 1_500)
    long = [rollout(sample=i, turns=turns((1, 2), [3] * 200), reward=float(i)) for i in range(2)]
    _, out = advance([version_event(0), *(rollout_event(i, r) for i, r in enumerate(long))])
    ((kind, offsets, cause),) = fates(out)
    assert (kind, offsets) == ("filtered", [0, 1])
    assert cause.startswith("group larger than a record: ")
    assert groups(out)[0].uids == []


def test_demonstrations_train_although_their_advantages_are_all_0():
    """A group without advantages is filtered; one that the cross entropy trains is not."""
    events = [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(2))]
    filtering = replace(CONFIG, zero_advantage="filter")
    _, out = advance(events, filtering)
    assert [group.uids for group in groups(out)] == [[]]
    imitated = LossWeights(policy_gradient=0, cross_entropy=1)
    _, out = advance(events, replace(filtering, losses={"copy": imitated}))
    (scored,) = groups(out)
    assert len(scored.uids) == 2 and scored.cross_entropy_weights is not None
    assert scored.cross_entropy_weights.tolist() == [1] * 6


def test_a_group_whose_experts_alone_are_too_large_is_not_scored(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(closing, "joined_bytes", lambda members: 1_000)
    monkeypatch.setattr(closing, "record_limit", lambda topic: 999)
    monkeypatch.setattr(closing, "score_group", None)
    record, cause, _, is_unscored = closed(1.0, 0.0)
    assert record.uids == [] and "1,000 bytes" in cause and not is_unscored
