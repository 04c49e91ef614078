"""Decides whether a run is over, and how far it is from its target. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from streamrl.config.goals import reaches
from streamrl.config.sections.batches import Target
from streamrl.config.sections.operation import Orchestrator
from streamrl.run.monitoring.run_view import RunView, active_s, recent_rewards

# The exit code of a run whose time is over without its target. What starts an orchestrator again
# after a failure can tell it from one: another start has no more time.
TIME_OVER = 16


class Verdict(NamedTuple):
    """Why the run is over, and the exit code of the orchestrator."""

    exit_code: int
    reason: str


def run_finished(limits: Orchestrator, view: RunView, time_s: float) -> Verdict | None:
    """The verdict if the run is over, otherwise None.

    A run succeeds when it reaches its target or its last step. A run with a target fails when its
    time is over, which is that of all its sessions: an orchestrator that is started again continues
    with the seconds that those before it have published.
    """
    target = limits.target
    if target is not None and target_reached(view, target):
        return Verdict(0, f"target reached: {target_progress(view, target)}")
    if limits.max_steps and view.version >= limits.max_steps:
        return Verdict(0, f"step {view.version} of {limits.max_steps} reached")
    if not limits.max_wall_s or active_s(view, time_s) < limits.max_wall_s:
        return None
    over = f"{limits.max_wall_s:.0f} s are over"
    if target is None:
        return Verdict(0, over)
    return Verdict(TIME_OVER, f"{over} without the target: {target_progress(view, target)}")


def target_reached(view: RunView, target: Target) -> bool:
    """Whether the env's mean reward over its last `target.batches` batches reaches the target.

    Only batches with rollouts of the env count, and there must be that many.
    """
    rewards = recent_rewards(view, target.env, target.batches)
    return len(rewards) == target.batches and reaches(fmean(rewards), target.reward)


def target_progress(view: RunView, target: Target) -> str:
    """How far the run is from its target, as text."""
    rewards = recent_rewards(view, target.env, target.batches)
    if not rewards:
        ended = sum(fates.total() for fates in view.fates.values())
        return (
            f"no batch with {target.env} was made (policy version {view.version},"
            f" {len(view.servers)} servers, {ended} rollouts ended)"
        )
    earned = f"{target.env} earned {fmean(rewards):.3f} over its last {len(rewards)} batches"
    return f"{earned}, wanted {target.reward:g} over {target.batches}; step {view.version}"
