import numpy as np
import pytest

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.log.protocol import Event, Undecodable
from streamrl.monitoring.run_view import (
    RunView,
    active_s,
    believable,
    blocking_reason,
    deciding_view,
    expired_share,
    latest,
    new_view,
    reached,
    recent_rewards,
    run_finished,
    total,
    update_view,
)
from streamrl.records import Demand, Fate, Metric, PolicyVersion, Record, Server
from tests.orchestrator.script import batch


@pytest.fixture
def run() -> RunFile:
    target = {"env": "copy", "reward": 0.5, "batches": 2}
    return parse(
        {
            "run": "r",
            "envs": {"copy": {"replicas": 2}, "add": {}},
            "orchestrator": {"target": target, "max_wall_s": 60},
        }
    )


def metric(
    values: dict[str, float],
    step: int | None = None,
    time_s: float = 100.0,
    source: str = "batcher",
) -> Event:
    return event("metrics", source, Metric(source=source, time_s=time_s, values=values, step=step))


def event(topic: str, key: str, record: Record | None) -> Event:
    return Event(topic, 0, 0, key, record)


def reward(step: int, value: float) -> Event:
    return event("batches", str(step), batch(step, {"copy": [value]}))


def version(number: int, learner: str = "lead") -> Event:
    return event(
        "policy-versions",
        learner,
        PolicyVersion(
            learner=learner,
            version=number,
            uri="x",
            size_bytes=1,
            sha256="0",
            time_s=100.0 + number,
        ),
    )


def server(
    state: str = "ready",
    number: int = 0,
    heartbeat_s: float = 110.0,
    error: str = "",
    pool: str = "generation",
) -> Event:
    name = topology.inference_part(pool, 0)
    record = Server(
        server_id=name,
        url="",
        pool=pool,
        state=state,
        version=number,
        heartbeat_s=heartbeat_s,
        error=error,
    )  # type: ignore[arg-type]
    return event("servers", name, record)


def seen(run: RunFile, *events: Event, since_s: float = 100.0) -> RunView:
    return update_view(deciding_view(run, since_s), events)


def test_versions_of_the_lead_learner_count(run: RunFile):
    found = seen(run, version(0), version(2, "other"), version(1))
    assert (found.version, found.version_s) == (1, 101.0)


def test_a_server_comes_and_goes(run: RunFile):
    found = seen(run, server(number=3))
    assert found.servers["inference-0"].version == 3
    assert seen(run, server(), event("servers", "inference-0", None)).servers == {}


def test_fates_are_counted_by_rollout(run: RunFile):
    batched = Fate(fate="batched", environment="copy", partition=0, offsets=np.arange(3), batch=0)
    expired = Fate(fate="expired", environment="copy", partition=0, offsets=np.arange(1))
    found = seen(run, event("fates", "copy", batched), event("fates", "copy", expired))
    assert found.fates["copy"] == {"batched": 3, "expired": 1}
    assert expired_share(found, "copy") == 0.25 and expired_share(found, "add") is None


def test_gauges_are_the_newest_and_sums_are_over_the_sources_asked_for(run: RunFile):
    rates = [
        metric({"env/rollouts_per_s": value}, source=source, time_s=time_s)
        for source, value, time_s in (
            ("env-copy-0", 1, 1),
            ("env-copy-0", 2, 9),
            ("env-copy-1", 3, 9),
        )
    ]
    found = seen(run, *rates)
    assert total(found, "env/rollouts_per_s", ["env-copy-0", "env-copy-1"]) == 5
    assert total(found, "env/rollouts_per_s", ["env-copy-0", "env-copy-1"], since_s=10) is None
    assert latest(found, "env/rollouts_per_s") in (2, 3) and latest(found, "nothing") is None


def test_what_cannot_be_read_changes_nothing(run: RunFile):
    assert update_view(
        new_view(run), [Event("metrics", 0, 0, "x", Undecodable("broken", b"", ()))]
    ) == new_view(run)


def test_the_target_is_a_mean_over_its_last_batches(run: RunFile):
    target = run.orchestrator.target
    assert target is not None
    assert not reached(seen(run, reward(0, 1.0)), target)  # one batch is not two
    assert reached(seen(run, reward(0, 0.0), reward(1, 0.2), reward(2, 0.8)), target)
    assert not reached(seen(run, reward(0, 1.0), reward(1, 0.2), reward(2, 0.7)), target)


def test_a_batch_that_is_heard_of_twice_counts_once(run: RunFile):
    assert recent_rewards(
        seen(run, reward(0, 0.1), reward(1, 0.2), reward(1, 0.2)), "copy", 5
    ) == pytest.approx([0.1, 0.2])


def test_batches_are_kept_in_order_and_so_many_of_them(run: RunFile):
    found = seen(run, *(reward(step, step / 8) for step in (1, 2, 4, 3)))
    assert recent_rewards(found, "copy", 2) == [0.375, 0.5]
    found.rewards_kept = 3
    # one goes for one that comes
    assert list(update_view(found, [reward(5, 0.25)]).rewards["copy"]) == [2, 3, 4, 5]
    assert list(update_view(found, [reward(6, 0.25)]).rewards["copy"]) == [3, 4, 5, 6]


def test_metrics_of_whomever_reach_no_target(run: RunFile):
    forged = [metric({"batches/copy/reward/mean": 1e6}, step) for step in range(20)]
    assert run_finished(run.orchestrator, seen(run, *forged), 100.0) is None
    mixed = [
        reward(0, 0.5),
        metric({"batches/copy/reward/mean": -1e6}, 1 << 40),
        *forged,
        reward(1, 0.6),
    ]
    verdict = run_finished(run.orchestrator, seen(run, *mixed), 100.0)
    assert verdict is not None and "copy earned 0.550 over its last 2 batches" in verdict.reason
    assert seen(run, *mixed).batch == 1


@pytest.mark.parametrize(
    ("forged", "left"),
    [
        (
            metric({"batcher/blocked_s": 1.0, "batcher/batch_age_mean": float("inf")}),
            {"batcher/blocked_s"},
        ),
        (metric({"batcher/blocked_s": float("nan")}), set[str]()),
        (
            metric({"batcher/blocked_s": 1.0, "env/rollouts_per_s": 1.0}, source="env-copy-0"),
            {"env/rollouts_per_s"},
        ),
        (metric({"orchestrator/active_s": 1e9}, source="env-copy-0"), set[str]()),
        (
            metric({"inference/mismatch_tokens": 2.0}, source="inference-0"),
            {"inference/mismatch_tokens"},
        ),
        (metric({"batcher/blocked_s": 1.0}, time_s=float("inf")), None),
        (metric({"batcher/blocked_s": 1.0}, step=1 << 40), None),
        (metric({"batcher/blocked_s": 1.0}, step=-1), None),
        (
            event(
                "metrics",
                "env-copy-0",
                Metric(source="batcher", time_s=1.0, values={"batcher/blocked_s": 1.0}),
            ),
            None,
        ),
    ],
)
def test_a_metric_is_believed_as_far_as_its_record_shows_that_it_is_one(
    forged: Event, left: set[str] | None
):
    believed = believable(forged, version=3)
    assert (believed and set(believed.values)) == left


def test_a_server_whose_clock_is_wrong_is_ready_when_it_is_heard(run: RunFile):
    behind = server(heartbeat_s=-3_600.0)
    assert seen(run, behind).ready_s is None  # may be of an earlier session
    found = update_view(deciding_view(run, 100.0), [behind], now_s=120.0)
    assert found.ready_s == 120.0 and run_finished(run.orchestrator, found, 179.0) is None
    assert run_finished(run.orchestrator, found, 180.0) is not None


def test_a_run_ends_well_at_its_target(run: RunFile):
    verdict = run_finished(run.orchestrator, seen(run, reward(0, 0.5), reward(1, 0.6)), 100.0)
    assert verdict is not None and verdict.exit_code == 0 and "0.550" in verdict.reason


def test_time_counts_from_the_first_ready_server_of_this_session(run: RunFile):
    assert run_finished(run.orchestrator, seen(run), 1_000.0) is None
    # of an earlier session
    assert run_finished(run.orchestrator, seen(run, server(heartbeat_s=50.0)), 1_000.0) is None
    assert run_finished(run.orchestrator, seen(run, server(heartbeat_s=110.0)), 169.9) is None
    verdict = run_finished(
        run.orchestrator, seen(run, server(heartbeat_s=110.0), reward(0, 0.2)), 170.0
    )
    assert (
        verdict is not None
        and verdict.exit_code == 1
        and "copy earned 0.200 over its last 1 batches, wanted 0.5 over 2" in verdict.reason
    )


def test_without_a_target_time_and_steps_end_a_run_well():
    run = parse(
        {"run": "r", "envs": {"copy": {}}, "orchestrator": {"max_steps": 2, "max_wall_s": 60}}
    )
    assert run_finished(run.orchestrator, seen(run, version(1)), 100.0) is None
    for found in (seen(run, version(2)), seen(run, server())):
        verdict = run_finished(run.orchestrator, found, 200.0)
        assert verdict is not None and verdict.exit_code == 0


def test_active_time_is_put_together_from_sessions(run: RunFile):
    earlier = metric({"orchestrator/active_s": 42.0}, source="orchestrator", time_s=60.0)
    assert active_s(seen(run, earlier), 200.0) == 42.0
    assert active_s(seen(run, earlier, server(heartbeat_s=110.0)), 200.0) == 42.0 + 90.0


def test_what_it_waits_for(run: RunFile):
    notes = {"learner": "making the model", "inference-0": "vLLM is starting, 20 s"}
    assert (
        blocking_reason(run, seen(run), 105.0, notes)
        == "waiting 5 s for the first policy version, learner: making the model"
    )
    assert (
        blocking_reason(run, seen(run, version(0)), 131.0, notes)
        == "waiting 31 s for inference-0: vLLM is starting, 20 s"
    )
    assert (
        blocking_reason(
            run, seen(run, version(0), server("error", -1, error="bad hash")), 131.0, notes
        )
        == "waiting 31 s for inference-0: bad hash"
    )
    begun = [version(0), server(), metric({"batcher/missing_tokens/add": 1200.0}, time_s=111.0)]
    assert (
        blocking_reason(run, seen(run, *begun), 112.0)
        == "waiting 2 s for the first batch: add is 1,200 tokens short"
    )
    blocked = metric({"batcher/missing_tokens/add": 64.0, "batcher/blocked_s": 3.0}, time_s=119.0)
    assert (
        blocking_reason(run, seen(run, *begun, reward(0, 0.1), blocked), 120.0)
        == "batch 1 has waited 3 s: add is 64 tokens short"
    )
    assert blocking_reason(run, seen(run, *begun, reward(0, 0.1)), 120.0) == ""


def test_it_waits_for_every_pool_that_an_env_asks():
    pools = {"evaluation": 2, "spare": 1}
    run = parse(
        {
            "run": "r",
            "envs": {"copy": {}, "add": {"pool": "evaluation"}},
            "inference": {"replicas": 1, "pools": pools},
        }
    )
    both = "waiting 31 s for inference-0; inference-evaluation-0; inference-evaluation-1"
    assert blocking_reason(run, seen(run, version(0)), 131.0) == both
    other = server("starting", -1, pool="evaluation")
    assert (
        blocking_reason(run, seen(run, version(0), server(), other), 131.0)
        == "waiting 31 s for inference-evaluation-0; inference-evaluation-1"
    )
    assert (
        blocking_reason(
            run,
            seen(
                run,
                version(0),
                server(),
                server(pool="evaluation"),
                metric({"batches/copy/reward/mean": 0.1}, 0),
            ),
            131.0,
        )
        == ""
    )


def test_demand_is_the_last_word(run: RunFile):
    asked = [
        Demand(environment="copy", wanted_tokens=n, held_tokens=0, closed_groups={}) for n in (5, 0)
    ]
    assert (
        seen(run, *(event("demand", "copy", record) for record in asked))
        .demand["copy"]
        .wanted_tokens
        == 0
    )
