"""What the orchestrator measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from streamrl.run.monitoring.frame import PartLine
from streamrl.run.monitoring.run_view import RunView, active_s
from streamrl.stream.records import FateKind

FATES: tuple[str, ...] = get_args(FateKind)


def gauges(view: RunView, parts: Sequence[PartLine], time_s: float) -> dict[str, float]:
    """The orchestrator's metrics by name: the states of parts and servers, the run's progress, the
    fates of rollouts, where the time went, and how long there has been a server.
    """
    values: dict[str, float] = {}
    for part in parts:
        values[f"orchestrator/restarts/{part.name}"] = float(part.restarts)
        values[f"orchestrator/running/{part.name}"] = float(part.state == "running")
    for env in {**view.demand, **view.fates}:
        for fate in FATES:
            values[f"orchestrator/fates/{env}/{fate}"] = float(view.fates[env][fate])
    for name, server in view.servers.items():
        values[f"orchestrator/server_ready/{name}"] = float(server.state == "ready")
        if server.version >= 0 or server.state != "ready":  # otherwise it has its own model
            behind = max(0, view.version - server.version)
            values[f"orchestrator/server_behind/{name}"] = float(behind)
        values[f"orchestrator/server_silent_s/{name}"] = max(0.0, time_s - server.heartbeat_s)
    if view.version >= 0:
        # The time in which the run was stopped was not spent waiting.
        announced_s = max(view.version_s, view.since_s)
        values["orchestrator/version"] = float(view.version)
        values["orchestrator/since_version_s"] = time_s - announced_s
    if view.batch >= 0:
        values["orchestrator/batch"] = float(view.batch)
    if any(view.time.learner_s.values()):
        for cause, spent_s in view.time.learner_s.items():
            values[f"orchestrator/learner_s/{cause}"] = spent_s
    for name, causes in view.time.servers_s.items():
        for cause, spent_s in causes.items():
            values[f"orchestrator/server_s/{name}/{cause}"] = spent_s
    if view.ready_s is not None:
        values["orchestrator/active_s"] = active_s(view, time_s)
    return values
