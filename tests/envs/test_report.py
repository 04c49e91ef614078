from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.host import EnvHost
from streamrl.envs.report import EnvReport, HostReport
from streamrl.stream.records import Rollout
from tests.support.build import rollout


def replica(**more: Any) -> Any:
    """As much of a replica as a report reads."""
    settings = Env(reward_weights=more.pop("reward_weights", {}))
    return SimpleNamespace(
        name="copy",
        producer="copy-0",
        running=more.pop("running", set()),
        limit=SimpleNamespace(outstanding=3, capacity=5, demand=more.pop("demand", None)),
        stats=None,
        runner=SimpleNamespace(settings=settings, recorder=None),
        **more,
    )


def report(*rollouts: Rollout, waiting_s: float = 0.0) -> EnvReport:
    made = EnvReport(waiting_s)
    made.count([SimpleNamespace(rollouts=list(rollouts))])  # type: ignore[list-item]
    return made


def test_metrics_of_what_was_done_since_the_last_report():
    cut = rollout("copy", "g", 2, reward=1.0, truncated=True, metadata={"truncation": "turns"})
    done = report(
        rollout("copy", "g", 0, reward=0.5), rollout("copy", "g", 1, failure="no server"), cut
    )
    values = done.metrics(replica())
    assert values["env/failed"] == 1 and values["env/reward_mean"] == 0.75
    assert values["env/truncated/turns"] == 1
    assert (values["env/groups_outstanding"], values["env/groups_capacity"]) == (3, 5)
    assert values["env/rollouts_per_s"] > 0
    assert "env/reward_mean" not in report().metrics(replica())


def test_failures_and_weights_that_nobody_earns_are_warned_of(caplog: pytest.LogCaptureFixture):
    weighed = replica(reward_weights={"exat": 2.0})
    report(
        rollout("copy", "g", 0), rollout("copy", "g", 1, failure="no server"), waiting_s=1.0
    ).warn(weighed)
    assert "copy-0: 1 of 2 rollouts failed, the last: no server" in caplog.text
    assert "envs.copy.reward_weights: no rollout has earned a 'exat'" in caplog.text
    caplog.clear()
    report(rollout("copy", "g", 0)).warn(replica(reward_weights={"exact": 2.0}))
    assert caplog.text == ""


def test_a_wait_for_demand_adds_up_until_there_is_one():
    waiting = report(waiting_s=5.0)
    waiting.started_s -= 5.0
    following = waiting.next(replica())
    assert following.rollouts == [] and following.waiting_s >= 10.0
    assert waiting.next(replica(demand=object())).waiting_s == 0.0


class Meter:
    def __init__(self) -> None:
        self.sources: list[str] = []

    def publish(self, values: object, source: str) -> None:
        self.sources.append(source)


def host_report(count: int) -> HostReport:
    replicas = [replica(source=f"env-copy-{i}", warned=i) for i in range(count)]
    for i, each in enumerate(replicas):
        each.producer = f"copy-{i}"
    return HostReport(EnvHost(replicas, []))


def test_replicas_without_a_demand_are_warned_of_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.envs.report.NO_DEMAND_S", 0.0)
    monkeypatch.setattr("streamrl.envs.report.REPORT_S", 0.0)
    monkeypatch.setattr("streamrl.envs.report.REPORTS_PER_S", 10**9)
    reports = host_report(3)
    reports.publish(Meter())  # type: ignore[arg-type]
    assert "copy-0 and 2 more: no demand heard for 0 s; is the batcher running?" in caplog.text


def test_many_replicas_report_in_turn_and_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.envs.report.REPORT_S", 0.0)
    monkeypatch.setattr("streamrl.envs.report.REPORTS_PER_S", 10**9)
    reports = host_report(25)
    meter = Meter()
    for _ in range(5):
        reports.publish(meter)  # type: ignore[arg-type]
    assert meter.sources == [f"env-copy-{i % 25}" for i in range(50)]
