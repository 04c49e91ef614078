from __future__ import annotations

from typing import Any

import pytest

from streamrl.dashboard import state as states
from streamrl.dashboard import views
from streamrl.dashboard.index import IN_FLIGHT, Query
from streamrl.dashboard.state import BySteps, Moments, State, Steps, fold, hear, lags, new, published
from streamrl.stream.log import Message
from tests.dashboard.made import END_S, RUN, messages


def folded(taken: list[Message], ahead: bool = True) -> State:
    """`ahead`: as at the start, when versions are heard and large topics read before the books; otherwise as it comes."""
    state = new(RUN)
    if ahead:
        for message in taken:
            if message.topic == "policy-versions":
                hear(state, message)
        taken = sorted(taken, key=lambda message: message.topic in states.BOOKS)
    for message in taken:
        fold(state, message)
    return state


@pytest.fixture(params=[True, False], ids=["at the start", "as it comes"])
def state(request: pytest.FixtureRequest) -> State:
    return folded(messages(), request.param)


def test_a_step_lasts_from_its_version_to_the_next():
    steps = Steps()
    for version, time_s in ((4, 10.0), (5, 20.0), (5, 25.0), (4, 26.0)):
        steps.hear(version, time_s)
    assert [steps.at(time_s) for time_s in (9.9, 10.0, 19.9, 20.0, 99.0)] == [-1, 4, 4, 5, 5]
    assert steps.end_s(4) == 20.0 and steps.end_s(5) == float("inf") and steps.end_s(-1) == 10.0


def test_a_count_knows_how_much_it_was():
    counts = BySteps()
    for step, count in ((0, 2), (3, 1), (3, 1), (1, 5)):  # the last one is late
        counts.add(step, count)
    assert [counts.until(step) for step in (-1, 0, 1, 2, 3, None)] == [0, 2, 7, 7, 9, 9]


def test_fates_and_what_is_in_flight_sum_up_to_what_was_published(state: State):
    (now,) = views.fates(state)
    assert now == {"env": "copy", "published": 8, "counts": {**dict.fromkeys(now["counts"], 0), "batched": 4, "failed": 1, IN_FLIGHT: 3}}
    assert sum(now["counts"].values()) == now["published"]
    assert [views.fates(state, step)[0]["published"] for step in range(3)] == [3, 5, 8]
    assert [views.fates(state, step)[0]["counts"]["failed"] for step in range(3)] == [0, 1, 1]
    assert {kind: count for kind, count in now["counts"].items() if count and kind != IN_FLIGHT} == dict(
        state.view.fates["copy"]
    )  # as `status` counts


def test_curves_belong_to_their_batch(state: State):
    reward, *_ = views.panels(state)
    assert reward["series"][0]["points"] == [[0, 0.0], [1, 0.25], [2, 0.5]]
    assert views.panels(state, 1)[0]["series"][0]["points"] == [[0, 0.0], [1, 0.25]]
    loss = next(panel for panel in views.panels(state) if panel["title"] == "Loss")
    assert loss["series"] == [{"name": "loss", "points": [[0, 1.0], [1, 0.75], [2, 0.5]]}]


def test_batches_by_env_and_age(state: State):
    made = views.composition(state)
    assert made["ages"] == [0] and [(bar["first"], bar["env"], bar["age"]) for bar in made["bars"]] == [(0, [2], [2]), (1, [2], [2])]
    assert len(views.composition(state, 0)["bars"]) == 1


def test_lag_is_what_was_published_and_not_taken(state: State):
    # by the end of step 1 five rollouts were published and taken; in step 2 three more came and two were taken. Group 2 lies before the batcher.
    assert lags(state, 0) == {"buffer": 1, "batcher": 0, "learner-lead": 1}
    assert lags(state, 1) == {"buffer": 0, "batcher": 0, "learner-lead": 1}
    assert lags(state) == {"buffer": 1, "batcher": 1, "learner-lead": 0}
    assert lags(new(RUN)) == {"buffer": None, "batcher": None, "learner-lead": None}


def test_rollouts_as_they_were(state: State):
    everything = views.page(state, Query())
    assert everything["total"] == 8 and everything["rows"][0]["uid"] == "an unreadable record"
    then = views.page(state, Query(), step=0)
    assert [(row["uid"], row["fate"], row["batch"]) for row in then["rows"]] == [
        ("bad-0", IN_FLIGHT, None),
        ("g0-0", "batched", 0),
        ("g0-1", "batched", 0),
    ]
    assert views.page(state, Query(fate="failed"))["rows"][0]["uid"] == "bad-0"


def view_of(state: State, time_s: float, step: int | None = None) -> dict[str, Any]:
    found = views.overview(state, time_s, step)
    page = views.page(state, Query(), step=step)
    return {name: found[name] for name in ("loop", "figures", "panels", "composition", "fates", "step")} | {
        "rows": page["rows"],
        "total": page["total"],
    }


@pytest.mark.parametrize("step", [0, 1])
def test_the_slider_is_the_same_fold_stopped_at_a_step(step: int, state: State):
    """The whole page at step k, of the whole run, is the page of a run that has only come to the end of step k."""
    end_s = 10.0 * (step + 1)
    stopped = folded([message for message in messages() if message.timestamp_s < end_s])
    assert view_of(state, END_S, step) == view_of(stopped, end_s)
    assert view_of(state, END_S, step)["loop"][0]["rate"] == 2.0 + step  # rollouts/s of the env, as it said then


def test_the_last_step_is_the_run_as_it_is(state: State):
    assert view_of(state, END_S, 2) == view_of(state, END_S)


def test_another_learners_versions_are_no_steps(state: State):
    assert state.steps.versions == [0, 1, 2] and state.view.version == 2


def test_moments_of_a_long_run_are_thinned():
    moments = Moments()
    for step in range(5_000):
        if moments.wanted(step):
            moments.keep(step, [step])  # type: ignore[list-item]
    assert len(moments.kept) <= states.MOMENTS and moments.every == 16
    assert moments.at(0) == [0] and moments.at(4_999) == [4_992] and Moments().at(3) == []


def test_what_nobody_can_read_is_passed_over():
    state = folded(
        [*messages(), Message("metrics", b"x", b"\xc1", (("schema", b"metric/1"),), 0, 99, 41.0), Message("elsewhere", b"", b"", (), 0, 0, 41.0)]
    )
    assert published(state, "rollouts") == 8
