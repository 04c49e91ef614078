from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.report import NO_DEMAND_S, EnvReport
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


def test_a_wait_for_demand_is_warned_of_every_few_seconds(caplog: pytest.LogCaptureFixture):
    waiting = report(waiting_s=NO_DEMAND_S)
    following = waiting.next(replica())
    assert following.waiting_s >= NO_DEMAND_S and caplog.text == ""
    waiting.started_s -= NO_DEMAND_S
    following = waiting.next(replica())
    assert "copy-0: no demand heard for 10 s; is the batcher running?" in caplog.text
    assert following.rollouts == [] and following.waiting_s >= 2 * NO_DEMAND_S
    assert waiting.next(replica(demand=object())).waiting_s == 0.0
