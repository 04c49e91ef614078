from __future__ import annotations

import numpy as np
import pytest

from streamrl.extensions.dashboard import rollout_views
from streamrl.extensions.dashboard.index import IN_FLIGHT, Query
from streamrl.stream.records import Batch, Turn, VersionSpan
from tests.extensions.dashboard.made import folded, messages
from tests.support.build import floats, rollout, spans, tokens


def batch(
    uids: list[str],
    lengths: list[int],
    advantages: list[float],
    token_advantages: list[float] | None = None,
    masks: list[list[int]] | None = None,
) -> Batch:
    n = len(uids)
    total = sum(lengths)
    sampled = total if masks is None else sum(map(sum, masks))
    return Batch(
        number=3,
        policy_version=3,
        row_count=1,
        max_seq_len=64,
        environments=["copy"],
        group_ids=["g"],
        group_environments=np.zeros(1, np.int32),
        prompts=tokens(1, 2),
        prompt_lengths=np.array([2], np.int32),
        uids=uids,
        groups=np.zeros(n, np.int32),
        rows=np.zeros(n, np.int32),
        lengths=np.array(lengths, np.int32),
        tokens=np.zeros(total, np.uint16),
        policy_logprobs=np.zeros(sampled, np.float32),
        advantages=floats(*advantages),
        token_advantages=None if token_advantages is None else floats(*token_advantages),
        rewards=np.zeros(n, np.float32),
        temperatures=np.ones(n, np.float32),
        oldest_versions=np.zeros(n, np.int32),
        **({} if masks is None else spans(*masks)),
    )


def test_the_prompt_has_no_advantage_and_the_answer_its_own():
    asked, answer = rollout_views.advantages(
        rollout("copy", "g", 0), batch(["other", "g-0"], [2, 3], [9.0, -0.5])
    )
    assert asked is None and answer.tolist() == [-0.5] * 3


def test_advantages_of_tokens_are_cut_by_the_sequences_before():
    _, answer = rollout_views.advantages(
        rollout("copy", "g", 0), batch(["other", "g-0"], [2, 3], [9.0, 0.0], [7, 7, 0.1, 0.2, 0.3])
    )
    np.testing.assert_allclose(answer, [0.1, 0.2, 0.3], rtol=1e-6)


def test_a_rollout_that_forked_is_two_sequences():
    said = [
        Turn(message="", role="user", tokens=tokens(1, 2)),
        Turn(message="", role="assistant", tokens=tokens(3), logprobs=floats(-1)),
    ]
    again = [
        Turn(message="", role="user", tokens=tokens(1, 2, 5), fork=True),
        Turn(message="", role="assistant", tokens=tokens(6, 7), logprobs=floats(-1, -1)),
    ]
    found = rollout_views.advantages(
        rollout("copy", "g", 0, turns=[*said, *again]),
        batch(["g-0", "g-0"], [1, 3], [0.0, 0.0], [4, 5, 6], [[1], [0, 1, 1]]),
    )
    assert found[0] is found[2] is None
    assert found[1].tolist() == [4] and found[3].tolist() == [5, 6]


@pytest.mark.parametrize("uids, lengths", [(["x"], [3]), (["g-0", "g-0"], [3, 3]), (["g-0"], [9])])
def test_a_batch_that_has_it_otherwise_says_nothing(uids: list[str], lengths: list[int]):
    assert rollout_views.advantages(
        rollout("copy", "g", 0), batch(uids, lengths, [1.0] * len(uids))
    ) == [
        None,
        None,
    ]


def test_a_rollout_with_its_tokens():
    made = rollout(
        "copy", "g", 0, version=4, reward=0.5, metadata={"why": {"a": [1]}, "said": "<b>"}
    )
    found = rollout_views.detail(
        made, batch(["g-0"], [3], [0.25]), lambda ids: [f"<{id}>" for id in ids]
    )
    asked, answer = found["turns"]
    assert (
        asked["ids"] == [1, 2]
        and asked["logprobs"] is asked["advantages"] is None
        and asked["texts"] == ["<1>", "<2>"]
    )
    assert (
        answer["logprobs"] == [-0.5] * 3
        and answer["advantages"] == [0.25] * 3
        and answer["spans"] == [[4, 0, 3]]
    )
    assert found["metadata"] == {"why": '{"a":[1]}', "said": "<b>"} and found["rewards"] == {
        "exact": 0.5
    }


def test_tokens_of_two_versions_are_said_apart():
    made = rollout("copy", "g", 0, version=4, newest=5)
    how = made.turns[1].inference_metadata
    # which is which nobody knows
    assert how is not None and rollout_views.detail(made, None, None)["turns"][1]["spans"] == []
    spans = [VersionSpan(version=4, start=0, end=2), VersionSpan(version=5, start=2, end=3)]
    turn = Turn(
        message="",
        role="assistant",
        tokens=tokens(3, 4, 5),
        logprobs=floats(-1, -1, -1),
        inference_metadata=type(how)(server="s", temperature=1.0, version_spans=spans),
    )
    found = rollout_views.detail(
        rollout("copy", "g", 0, version=4, newest=5, turns=[turn]), None, None
    )
    assert (
        found["turns"][0]["spans"] == [[4, 0, 2], [5, 2, 3]] and found["turns"][0]["texts"] is None
    )


def test_a_very_long_rollout_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_views, "MOST_TOKENS", 4)
    asked, answer = rollout_views.detail(rollout("copy", "g", 0), None, None)["turns"]
    assert (asked["ids"], asked["omitted"], answer["ids"], answer["omitted"]) == (
        [1, 2],
        0,
        [3, 4],
        1,
    ) and len(answer["logprobs"]) == 2


def test_a_failed_rollout_has_its_cause():
    found = rollout_views.detail(rollout("copy", "g", 0, failure="timeout"), None, None)
    assert found["failure"] == "timeout" and found["turns"] == [] and found["problem"] == "g"


def test_rollouts_as_they_were():
    state = folded(messages())
    everything = rollout_views.page(state, Query())
    assert everything["total"] == 8 and everything["rows"][0]["uid"] == "an unreadable record"
    then = rollout_views.page(state, Query(), step=0)
    assert [(row["uid"], row["fate"], row["batch"]) for row in then["rows"]] == [
        ("bad-0", IN_FLIGHT, None),
        ("g0-0", "batched", 0),
        ("g0-1", "batched", 0),
    ]
    assert rollout_views.page(state, Query(fate="failed"))["rows"][0]["uid"] == "bad-0"
