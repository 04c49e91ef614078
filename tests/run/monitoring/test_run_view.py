import numpy as np
import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring import run_view as views
from streamrl.run.monitoring.metric_names import METRICS
from streamrl.run.monitoring.run_view import (
    MAX_NAMES,
    active_s,
    arrival_rate,
    expired_share,
    latest,
    new_view,
    recent_rewards,
    total,
    update_view,
)
from streamrl.stream.log.protocol import Event, Undecodable
from streamrl.stream.records import Demand, Fate, Metric
from tests.run.monitoring.events import event, metric, reward, server, two_envs, version, view_of


@pytest.fixture
def run() -> RunFile:
    return two_envs()


def test_versions_of_the_lead_learner_count(run: RunFile):
    found = view_of(run, version(0), version(2, "other"), version(1))
    assert (found.version, found.version_s) == (1, 101.0)


def test_a_server_comes_and_goes(run: RunFile):
    found = view_of(run, server(number=3))
    assert found.servers["inference-0"].version == 3
    assert view_of(run, server(), event("servers", "inference-0", None)).servers == {}


def test_fates_are_counted_by_rollout(run: RunFile):
    batched = Fate(fate="batched", environment="copy", partition=0, offsets=np.arange(3), batch=0)
    expired = Fate(fate="expired", environment="copy", partition=0, offsets=np.arange(1))
    found = view_of(run, event("fates", "copy", batched), event("fates", "copy", expired))
    assert found.fates["copy"] == {"batched": 3, "expired": 1}
    assert expired_share(found.fates["copy"]) == 0.25


def test_gauges_are_the_newest_and_sums_are_over_the_sources_asked_for(run: RunFile):
    rates = [
        metric({"env/rollouts_per_s": value}, source=source, time_s=time_s)
        for source, value, time_s in (
            ("env-copy-0", 1, 1),
            ("env-copy-0", 2, 9),
            ("env-copy-1", 3, 9),
        )
    ]
    found = view_of(run, *rates)
    assert total(found, "env/rollouts_per_s", ["env-copy-0", "env-copy-1"]) == 5
    assert total(found, "env/rollouts_per_s", ["env-copy-0", "env-copy-1"], since_s=10) is None
    assert latest(found, "env/rollouts_per_s") in (2, 3) and latest(found, "nothing") is None


def test_names_that_somebody_makes_up_are_bounded(run: RunFile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "MAX_SOURCES", 2)
    monkeypatch.setattr(views, "MAX_NAMES", 3)
    made_up = [
        metric({f"part/{name}": 1.0}, source=f"part-{source}")
        for source in range(4)
        for name in range(5)
    ]
    found = view_of(run, *made_up, metric({"part/0": 2.0}, source="part-0", time_s=109.0))
    assert {source: len(gauges) for source, gauges in found.gauges.items()} == {
        "part-0": 3,
        "part-1": 3,
    }
    assert len(found.heard_s) == 2 and latest(found, "part/0") == 2.0


def test_all_names_of_a_thousand_envs_are_kept():
    of_env = [spec for spec in METRICS if "{environment}" in spec.name]
    assert 20 < len(of_env) < MAX_NAMES / 1_000


def test_what_cannot_be_read_changes_nothing(run: RunFile):
    assert update_view(
        new_view(run), [Event("metrics", 0, 0, "x", Undecodable("broken", b"", ()))]
    ) == new_view(run)


def test_a_batch_that_is_heard_of_twice_counts_once(run: RunFile):
    assert recent_rewards(
        view_of(run, reward(0, 0.1), reward(1, 0.2), reward(1, 0.2)), "copy", 5
    ) == pytest.approx([0.1, 0.2])


def test_batches_are_kept_in_order_and_so_many_of_them(run: RunFile):
    found = view_of(run, *(reward(step, step / 8) for step in (1, 2, 4, 3)))
    assert recent_rewards(found, "copy", 2) == [0.375, 0.5]
    found.rewards_kept = 3
    # one goes for one that comes
    assert list(update_view(found, [reward(5, 0.25)]).rewards["copy"]) == [2, 3, 4, 5]
    assert list(update_view(found, [reward(6, 0.25)]).rewards["copy"]) == [3, 4, 5, 6]


def test_active_time_is_put_together_from_sessions(run: RunFile):
    earlier = metric({"orchestrator/active_s": 42.0}, source="orchestrator", time_s=60.0)
    assert active_s(view_of(run, earlier), 200.0) == 42.0
    assert active_s(view_of(run, earlier, server(heartbeat_s=110.0)), 200.0) == 42.0 + 90.0


def test_demand_is_the_last_word(run: RunFile):
    asked = [
        Demand(environment="copy", wanted_tokens=n, held_tokens=0, closed_groups={}) for n in (5, 0)
    ]
    assert (
        view_of(run, *(event("demand", "copy", record) for record in asked))
        .demand["copy"]
        .wanted_tokens
        == 0
    )


def test_a_fate_of_no_rollout_is_no_share(run: RunFile):
    nobody = Fate(fate="expired", environment="copy", partition=0, offsets=np.arange(0))
    assert expired_share(view_of(run, event("fates", "copy", nobody)).fates["copy"]) is None


def outside(values: dict[str, float], time_s: float) -> Event:
    return Event("metrics", 0, 0, "buffer", Metric(source="buffer", time_s=time_s, values=values))


def test_the_rate_of_an_env_from_outside_is_what_the_buffer_reads():
    run = parse({"run": "r", "envs": {"copy": {}, "add": {"replicas": 0}}})
    read = "part/read_records/rollouts.add"
    view = update_view(
        new_view(run, 100.0),
        [
            outside({read: value}, time_s)
            for value, time_s in ((900, 99), (10, 150), (30, 156), (50, 158), (50, 160))
        ],
    )
    assert arrival_rate(view, "add", 160.0) == (50 - 10) / 10
    assert arrival_rate(view, "add", 164.0) == 0.0 and arrival_rate(view, "copy", 160.0) is None
