import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring.run_view import deciding_view, update_view
from streamrl.run.monitoring.verdict import TIME_OVER, run_finished, target_reached
from tests.run.monitoring.events import metric, reward, server, two_envs, version, view_of


@pytest.fixture
def run() -> RunFile:
    return two_envs()


def test_the_target_is_a_mean_over_its_last_batches(run: RunFile):
    target = run.orchestrator.target
    assert target is not None
    assert not target_reached(view_of(run, reward(0, 1.0)), target)  # one batch is not two
    assert target_reached(view_of(run, reward(0, 0.0), reward(1, 0.2), reward(2, 0.8)), target)
    assert not target_reached(view_of(run, reward(0, 1.0), reward(1, 0.2), reward(2, 0.7)), target)


def test_metrics_of_whomever_reach_no_target(run: RunFile):
    forged = [metric({"batches/copy/reward/mean": 1e6}, step) for step in range(20)]
    assert run_finished(run.orchestrator, view_of(run, *forged), 100.0) is None
    mixed = [
        reward(0, 0.5),
        metric({"batches/copy/reward/mean": -1e6}, 1 << 40),
        *forged,
        reward(1, 0.6),
    ]
    verdict = run_finished(run.orchestrator, view_of(run, *mixed), 100.0)
    assert verdict is not None and "copy earned 0.550 over its last 2 batches" in verdict.reason
    assert view_of(run, *mixed).batch == 1


def test_a_server_whose_clock_is_wrong_is_ready_when_it_is_heard(run: RunFile):
    behind = server(heartbeat_s=-3_600.0)
    assert view_of(run, behind).ready_s is None  # may be of an earlier session
    found = update_view(deciding_view(run, 100.0), [behind], now_s=120.0)
    assert found.ready_s == 120.0 and run_finished(run.orchestrator, found, 179.0) is None
    assert run_finished(run.orchestrator, found, 180.0) is not None


def test_a_run_ends_well_at_its_target(run: RunFile):
    verdict = run_finished(run.orchestrator, view_of(run, reward(0, 0.5), reward(1, 0.6)), 100.0)
    assert verdict is not None and verdict.exit_code == 0 and "0.550" in verdict.reason


def test_time_counts_from_the_first_ready_server_of_a_session(run: RunFile):
    assert run_finished(run.orchestrator, view_of(run), 1_000.0) is None
    # of an earlier session
    assert run_finished(run.orchestrator, view_of(run, server(heartbeat_s=50.0)), 1_000.0) is None
    assert run_finished(run.orchestrator, view_of(run, server(heartbeat_s=110.0)), 169.9) is None
    verdict = run_finished(
        run.orchestrator, view_of(run, server(heartbeat_s=110.0), reward(0, 0.2)), 170.0
    )
    assert (
        verdict is not None
        and verdict.exit_code == TIME_OVER
        and "copy earned 0.200 over its last 1 batches, wanted 0.5 over 2" in verdict.reason
    )


def test_an_orchestrator_that_is_started_again_has_the_time_that_is_left(run: RunFile):
    earlier = metric({"orchestrator/active_s": 40.0}, source="orchestrator", time_s=90.0)
    again = view_of(run, earlier, server(heartbeat_s=110.0))
    assert run_finished(run.orchestrator, again, 129.9) is None
    assert run_finished(run.orchestrator, again, 130.0) is not None
    over = metric({"orchestrator/active_s": 60.0}, source="orchestrator", time_s=90.0)
    assert run_finished(run.orchestrator, view_of(run, over), 100.0) is not None


def test_without_a_target_time_and_steps_end_a_run_well():
    run = parse(
        {"run": "r", "envs": {"copy": {}}, "orchestrator": {"max_steps": 2, "max_wall_s": 60}}
    )
    assert run_finished(run.orchestrator, view_of(run, version(1)), 100.0) is None
    for found in (view_of(run, version(2)), view_of(run, server())):
        verdict = run_finished(run.orchestrator, found, 200.0)
        assert verdict is not None and verdict.exit_code == 0
