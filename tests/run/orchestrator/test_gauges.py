from __future__ import annotations

from streamrl.run.monitoring.frame import PartLine
from streamrl.run.monitoring.metric_names import find_metric
from streamrl.run.monitoring.run_view import RunView
from streamrl.run.orchestrator.gauges import gauges
from streamrl.stream.records import Demand, Server


def test_what_the_orchestrator_measures_of_a_run():
    fresh = Server(server_id="a", url="", version=5, state="ready", heartbeat_s=97.0)
    stale = Server(server_id="b", url="", version=2, state="error", heartbeat_s=40.0)
    demand = {"copy": Demand(environment="copy", wanted_tokens=1, held_tokens=0, closed_groups={})}
    seen = RunView(
        "lead",
        since_s=50.0,
        version=5,
        version_s=90.0,
        servers={"a": fresh, "b": stale},
        demand=demand,
        batch=6,
    )
    seen.fates["add"]["expired"] = 3
    values = gauges(seen, [PartLine("buffer", "back-off", 1.0, 2)], 100.0)
    assert [name for name in values if find_metric(name) is None] == []
    wanted = {
        "running/buffer": 0,
        "restarts/buffer": 2,
        "version": 5,
        "since_version_s": 10,
        "batch": 6,
    }
    wanted |= {
        "server_ready/a": 1,
        "server_ready/b": 0,
        "server_behind/a": 0,
        "server_behind/b": 3,
        "server_silent_s/a": 3,
        "server_silent_s/b": 60,
    }
    wanted |= {
        f"fates/{env}/{fate}": 0
        for env in ("copy", "add")
        for fate in ("batched", "expired", "filtered", "duplicate", "failed", "invalid")
    }
    assert values == {
        f"orchestrator/{name}": value for name, value in {**wanted, "fates/add/expired": 3}.items()
    }
    assert gauges(RunView("lead"), [], 100.0) == {}


def test_a_server_with_a_model_of_its_own_is_behind_nothing():
    own = Server(server_id="judge", url="", pool="judges", state="ready", heartbeat_s=99.0)
    starting = Server(server_id="a", url="", heartbeat_s=99.0)
    seen = RunView("lead", version=5, servers={"judge": own, "a": starting})
    values = gauges(seen, [], 100.0)
    behind = {name: value for name, value in values.items() if "server_behind" in name}
    assert behind == {"orchestrator/server_behind/a": 6}


def test_the_time_between_two_sessions_was_not_waiting():
    assert (
        gauges(RunView("lead", since_s=95.0, version=5, version_s=10.0), [], 100.0)[
            "orchestrator/since_version_s"
        ]
        == 5.0
    )
