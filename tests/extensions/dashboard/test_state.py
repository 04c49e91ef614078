from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from streamrl.extensions.dashboard import rollout_views, steps, views
from streamrl.extensions.dashboard import state as states
from streamrl.extensions.dashboard.index import Query
from streamrl.extensions.dashboard.state import LoopHistory, State, fold, lags, new, published
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Evaluation, Metric, PolicyVersion
from tests.extensions.dashboard.made import RUN, Topics, entry, fate, folded, messages
from tests.support.build import rollout


@pytest.fixture(params=[True, False], ids=["at the start", "as it comes"])
def state(request: pytest.FixtureRequest) -> State:
    return folded(messages(), request.param)


def test_lag_is_what_was_published_and_not_taken(state: State):
    # by the end of step 1 five rollouts were published and taken; in step 2 three more came and two
    # were taken. Group 2 lies before the batcher.
    assert lags(state, 0) == {"buffer": 1, "batcher": 0, "learner-lead": 1}
    assert lags(state, 1) == {"buffer": 0, "batcher": 0, "learner-lead": 1}
    assert lags(state) == {"buffer": 1, "batcher": 1, "learner-lead": 0}
    assert lags(new(RUN)) == {"buffer": None, "batcher": None, "learner-lead": None}


def test_another_learners_versions_are_no_steps(state: State):
    assert state.steps.versions == [0, 1, 2] and state.view.version == 2


def test_moments_of_a_long_run_are_thinned():
    moments = LoopHistory()
    for step in range(5_000):
        if moments.wanted(step):
            moments.keep(step, [step])  # type: ignore[list-item]
    assert len(moments.kept) <= states.MOMENTS and moments.every == 16
    assert moments.at(0) == [0] and moments.at(4_999) == [4_992] and LoopHistory().at(3) == []


def test_what_nobody_can_read_is_passed_over():
    state = folded(
        [
            *messages(),
            Message(
                topic="metrics",
                key=b"x",
                value=b"\xc1",
                headers=(("schema", b"metric/1"),),
                partition=0,
                offset=99,
                timestamp_s=41.0,
            ),
            Message(
                topic="elsewhere",
                key=b"",
                value=b"",
                headers=(),
                partition=0,
                offset=0,
                timestamp_s=41.0,
            ),
        ]
    )
    assert published(state) == 8


def long_run(count: int) -> list[Message]:
    """In step k, at second k: version k, a rollout, a batch, its fate, two metrics, and an
    evaluation in every tenth.
    """
    made = Topics()
    for k in range(count):
        made.add(
            k,
            "policy-versions",
            "lead",
            PolicyVersion(learner="lead", version=k, uri="", size_bytes=0, sha256=""),
        )
        made.add(k + 0.1, "rollouts.copy", "g", rollout("copy", "g", k, version=k))
        made.put(
            Message(
                topic="batches",
                key=str(k).encode(),
                value=b"",
                headers=(),
                partition=0,
                offset=0,
                timestamp_s=k + 0.2,
            )
        )
        made.add(k + 0.3, "fates", "copy", fate("batched", [k], k, k))
        made.add(k + 0.4, "journal.buffer", "buffer", entry("rollouts.copy", k, k + 1))
        values = {"batches/copy/reward/mean": k / count, "batcher/batch_age_mean": 0.0}
        made.add(
            k + 0.5, "metrics", "batcher", Metric(source="batcher", time_s=k, values=values, step=k)
        )
    return made.messages


@pytest.mark.parametrize("ahead", [True, False], ids=["at the start", "as it comes"])
def test_what_a_long_run_keeps_and_what_a_request_reads_is_bounded(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
):
    """600 steps, as if 40 were many: what the page is made from has no more, and an old step is
    shown as it was at the end of its piece.
    """
    monkeypatch.setattr(steps, "MOST", 40)
    monkeypatch.setattr(states, "BATCHES", 30)
    monkeypatch.setattr(steps, "thinned", partial(steps.thinned, recent=20, older=10))
    state = folded(long_run(600), ahead)
    counts = [
        state.built,
        *state.published.values(),
        *state.published_by.values(),
        *state.taken.values(),
        *state.ended.values(),
    ]
    by_step = [state.steps.versions, state.made_of, *counts, *state.curves.values()]
    # and one for what was before the first version
    assert len(by_step) == 9 and max(map(len, by_step)) <= 41
    assert (
        list(state.batches) == list(range(570, 600))
        and sum(map(len, state.view.rewards.values())) == 1
    )
    assert state.steps.width == 64 and views.overview(state, 600.0)["figures"]["rollouts"] == 600
    for asked, end in ((0, 63), (63, 63), (100, 127), (599, 599)):
        found = views.overview(state, 600.0, asked)
        assert found["step"] == asked and found["time_s"] == pytest.approx(end + 1, abs=0.6)
        assert (
            found["figures"]["rollouts"]
            == found["figures"]["batched"]
            == end + 1
            == sum(sum(bar["env"]) for bar in found["composition"]["bars"])
        )
        assert found["figures"]["age_mean"] == 0 and found["panels"][0]["series"][0]["points"][
            -1
        ] == [end, pytest.approx(end / 600, rel=1e-4)]
        assert lags(state, end)["buffer"] == 0 and found["loop"]
        assert (
            rollout_views.page(state, Query(), step=asked)["total"]
            == rollout_views.page(state, Query(fate="batched"), step=asked)["total"]
            == end + 1
        )
        bars = found["composition"]["bars"]
        assert (
            bars[0]["first"] == 0
            and bars[-1]["last"] == end
            and all(b["first"] == a["last"] + 1 for a, b in pairwise(bars))
        )


def test_evaluations_keep_their_results_and_not_their_problems():
    state = folded(messages())
    made = Evaluation(
        name="held",
        environment="copy",
        learner="lead",
        version=1,
        sha256="",
        problems=np.arange(3),
        samples=np.ones(3, np.int32),
        passed=np.ones(3, np.int32),
        rewards=np.ones(3, np.float32),
        pass_at=[],
        reward_mean=0.5,
        reward_low=0.0,
        reward_high=1.0,
    )
    fold(state, to_message(Output("evals", "held", made))._replace(timestamp_s=33.0))
    kept = state.evals["held"][1]
    assert kept.reward_mean == 0.5 and len(kept.problems) == len(kept.rewards) == 0
