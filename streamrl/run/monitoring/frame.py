"""What the display shows of a run at one time, and the figures that are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.bias import bias_lines
from streamrl.run.monitoring.blocking import blocking_reason
from streamrl.run.monitoring.cells import MOST_NAMED, first_of
from streamrl.run.monitoring.run_view import (
    RunView,
    active_s,
    all_fates,
    arrival_rate,
    buffer_total,
    expired_share,
    latest,
    recent_rewards,
    total,
    troubles,
)

FRESH_S = 5.0  # A rate that is older is not shown.
REWARD_BATCHES = 20  # The reward is a mean over so many batches, or what the target sets.
# The share of an env's rollouts that must have failed, or were dead-lettered, to be shown.
LEAST_TROUBLES = 0.01


@dataclass(frozen=True)
class PartLine:
    """A part as the display shows it."""

    name: str
    state: str  # running, back-off or silent
    for_s: float = 0.0  # seconds for which it has been in this state
    restarts: int = 0
    note: str = ""  # the last line that it logged


@dataclass(frozen=True)
class Frame:
    """Everything that is shown at one time."""

    run: RunFile
    view: RunView
    time_s: float  # now, in seconds since the epoch
    parts: Sequence[PartLine] = ()

    @property
    def waits_for(self) -> str:
        """What the run waits for, in words; empty if it does not wait."""
        notes = {part.name: part.note for part in self.parts}
        return blocking_reason(self.run, self.view, self.time_s, notes)

    @property
    def troubles(self) -> list[str]:
        """A line for each env of which many rollouts have failed or were dead-lettered, and for
        each way in which what is trained on is not like what was launched. Of many envs, lines for
        the first.
        """
        of_envs = troubles(self.view, LEAST_TROUBLES)
        more = len(of_envs) - MOST_NAMED
        others = [f"{more:,} more envs with failed or dead-lettered rollouts"] if more > 0 else []
        return [*of_envs[:MOST_NAMED], *others, *bias_lines(self.view.bias)]

    @property
    def evaluations(self) -> str:
        """The newest evaluations in words, each with its smallest k; empty if there are none."""
        shown: list[str] = []
        for _, evaluation in sorted(self.view.evals.items()):
            for passed in evaluation.pass_at[:1]:
                name = f"{evaluation.name} pass@{passed.k}"
                shown.append(f"{name} {passed.value:.3f} (v{evaluation.version})")
        return f"eval {first_of(shown)}" if self.view.evals else ""

    @property
    def step(self) -> str:
        """The last step, with the run's last one if its number is limited: 7/100."""
        done = str(max(self.view.version, 0))
        limit = self.run.orchestrator.max_steps
        return f"{done}/{limit}" if limit else done

    @property
    def running_s(self) -> float | None:
        """Seconds since the first server was ready after the last start, or None before."""
        ready_s = self.view.ready_s
        return None if ready_s is None else self.time_s - ready_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the run's limit of time, or None if it has no limit."""
        limit_s = self.run.orchestrator.max_wall_s
        return max(0.0, limit_s - active_s(self.view, self.time_s)) if limit_s else None

    @property
    def expired_share(self) -> float | None:
        """The share of expired rollouts among those of all envs that have a fate."""
        return expired_share(all_fates(self.view))

    def reward(self, env: str) -> float | None:
        """The env's mean reward over its last batches, or None if there are none."""
        target = self.run.orchestrator.target
        batches = REWARD_BATCHES if target is None else target.batches
        rewards = recent_rewards(self.view, env, batches)
        return fmean(rewards) if rewards else None

    def rollout_rate(self, env: str) -> float | None:
        """Rollouts per second that all replicas of the env publish, or None if none has reported it
        lately.

        For an env whose rollouts others publish, they are those that the buffer reads.
        """
        producers = self.run.envs[env].producers
        if not producers:
            return arrival_rate(self.view, env, self.time_s)
        sources = [topology.env_part(env, i) for i in range(producers)]
        return total(self.view, "env/rollouts_per_s", sources, self.time_s - FRESH_S)

    def buffered_tokens(self, env: str) -> float:
        """The env's tokens in the buffer and the batcher."""
        window = buffer_total(self.run, self.view, f"buffer/window_tokens/{env}")
        held = latest(self.view, f"batcher/held_tokens/{env}")
        return (window or 0.0) + (held or 0.0)
