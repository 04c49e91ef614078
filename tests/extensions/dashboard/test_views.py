from __future__ import annotations

from typing import Any

import pytest

from streamrl.extensions.dashboard import rollout_views, views
from streamrl.extensions.dashboard.index import IN_FLIGHT, Query
from streamrl.extensions.dashboard.state import State, fold, new
from tests.extensions.dashboard.made import AGENTS, END_S, folded, messages, session_messages


@pytest.fixture(params=[True, False], ids=["at the start", "as it comes"])
def state(request: pytest.FixtureRequest) -> State:
    return folded(messages(), request.param)


def test_fates_and_what_is_in_flight_sum_up_to_what_was_published(state: State):
    (now,) = views.fates(state)
    assert now == {
        "env": "copy",
        "published": 8,
        "counts": {**dict.fromkeys(now["counts"], 0), "batched": 4, "failed": 1, IN_FLIGHT: 3},
        "tokens": {**dict.fromkeys(now["tokens"], 0), "batched": 12, "failed": 3},
    }
    assert sum(now["counts"].values()) == now["published"]
    assert [views.fates(state, step)[0]["published"] for step in range(3)] == [3, 5, 8]
    assert [views.fates(state, step)[0]["counts"]["failed"] for step in range(3)] == [0, 1, 1]
    assert {
        kind: count for kind, count in now["counts"].items() if count and kind != IN_FLIGHT
    } == dict(state.view.fates["copy"])  # as `status` counts


def test_batches_by_env_and_age(state: State):
    made = views.composition(state)
    assert made["ages"] == [0] and [
        (bar["first"], bar["env"], bar["age"]) for bar in made["bars"]
    ] == [(0, [2], [2]), (1, [2], [2])]
    assert len(views.composition(state, 0)["bars"]) == 1


def view_of(state: State, time_s: float, step: int | None = None) -> dict[str, Any]:
    found = views.overview(state, time_s, step)
    page = rollout_views.page(state, Query(), step=step)
    return {
        name: found[name] for name in ("loop", "figures", "panels", "composition", "fates", "step")
    } | {
        "rows": page["rows"],
        "total": page["total"],
    }


@pytest.mark.parametrize("step", [0, 1])
def test_the_slider_is_the_same_fold_stopped_at_a_step(step: int, state: State):
    """The whole page at step k, of the whole run, is the page of a run that has only come to the
    end of step k.
    """
    end_s = 10.0 * (step + 1)
    stopped = folded([message for message in messages() if message.timestamp_s < end_s])
    assert view_of(state, END_S, step) == view_of(stopped, end_s)
    # rollouts/s of the env, as it said then
    assert view_of(state, END_S, step)["loop"][0]["rate"] == 2.0 + step


def test_the_last_step_is_the_run_as_it_is(state: State):
    assert view_of(state, END_S, 2) == view_of(state, END_S)


def test_the_page_is_told_of_sessions_as_they_were_at_a_step():
    state = new(AGENTS)
    for message in session_messages():
        fold(state, message)
    now = views.overview(state, 22.0)
    assert now["sessions"] == [
        {
            "env": "agent",
            "ends": {"finished": 2, "cut off: time": 1},
            "forks": {"template": 2},
        }
    ]
    then = views.overview(state, 22.0, 0)["sessions"][0]
    assert then["ends"] == {"finished": 1} and then["forks"] == {"template": 1}


def test_envs_without_agents_have_no_sessions():
    run = AGENTS.model_copy(update={"envs": {"agent": AGENTS.envs["copy"]}})
    state = new(run)
    for message in session_messages():
        fold(state, message)
    assert views.overview(state, 22.0)["sessions"] == [] and not state.sessions


def test_looking_at_a_run_whose_agents_have_made_nothing_yet_leaves_its_state_as_it_is():
    state = new(AGENTS)
    found = views.overview(state, 22.0)["sessions"]
    assert found == [{"env": "agent", "ends": {}, "forks": {}}] and not state.sessions
