"""How much of a batch each env is to have, as training goes on: decided by the batch's number, and
by the rewards in the batches before it.

Both are in the batcher's own log, so restart, replay and fork come to the same shares. A curriculum
maps (rules, progress, number of a batch) to the envs' fractions of its tokens, and is pure; an env
that it does not name has none, and what the fractions leave goes by availability. Your own: name it
MODULE:FUNCTION in the run file. docs/data.md says how to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from streamrl.batcher.assemble import heads
from streamrl.config.goals import CLOSE, reaches
from streamrl.config.plugins import import_path
from streamrl.records import Batch


@dataclass(frozen=True)
class Goal:
    """The mean reward of an env over the last `batches` batches that had it."""

    env: str
    reward: float
    batches: int


@dataclass(frozen=True)
class Stage:
    """Fractions by env, until a batch or a goal: whichever comes first."""

    fractions: dict[str, float]
    until_batch: int = 0  # the first that is not of this stage; 0: no number ends it
    until: Goal | None = None


@dataclass(frozen=True)
class Rules:
    """The curriculum of a run."""

    kind: str = "none"
    envs: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    batches: int = 10  # that the mean reward of an env is taken over
    least: float = 0.0  # fraction of each env (learnability)
    # of the batcher's rules: 1: a mean that is a rounding below a goal has reached it
    version: int = 0

    @property
    def memory(self) -> int:
        """Batches whose rewards are known."""
        return max([self.batches, *(stage.until.batches for stage in self.stages if stage.until)])


class Progress(msgspec.Struct, frozen=True):
    """What the batches made so far say."""

    stage: int = 0
    # mean reward of an env in each of the last batches that had it, oldest first
    rewards: dict[str, list[float]] = {}


Curriculum = Callable[[Rules, Progress, int], Mapping[str, float]]


def stages(rules: Rules, progress: Progress, batch: int) -> Mapping[str, float]:
    """The fractions of the stage that the batch belongs to."""
    return rules.stages[stage_of(rules, progress.stage, batch)].fractions


def learnability(rules: Rules, progress: Progress, batch: int) -> dict[str, float]:
    """In proportion to r (1 - r), r the env's mean reward within 0 and 1: most for what is won half
    the time, `least` for what always or never is.

    For success of 0 or 1 it is the variance of the reward, which is what a policy gradient feeds
    on. Sampling for Learnability, arXiv:2408.15099. An env that has not been in a batch counts as
    won half the time.
    """
    won = {
        env: min(max(mean(progress.rewards.get(env, [])[-rules.batches :] or [0.5]), 0.0), 1.0)
        for env in rules.envs
    }
    weights = {env: reward * (1 - reward) for env, reward in won.items()}
    total, free = math.fsum(weights.values()), 1 - rules.least * len(weights)
    return {
        env: rules.least + free * (weight / total if total else 1 / len(weights))
        for env, weight in weights.items()
    }


CURRICULA: dict[str, Curriculum] = {"stages": stages, "learnability": learnability}


def fractions_of(rules: Rules, progress: Progress, batch: int) -> dict[str, float]:
    """Of each env, in batch number `batch` at this progress. Raises ValueError naming the batch for
    what are no fractions of the run's envs.
    """
    found = curriculum_named(rules.kind)(rules, progress, batch)
    whole = (
        all(math.isfinite(fraction) and fraction >= 0 for fraction in found.values())
        and math.fsum(found.values()) <= 1 + 1e-9
    )
    if not whole or not found.keys() <= set(rules.envs):
        raise ValueError(
            f"batch {batch}: batcher.curriculum {rules.kind} gave {dict(found)}, no fractions of {', '.join(rules.envs)}"
        )
    return {env: float(found.get(env, 0.0)) for env in rules.envs}


def curriculum_named(kind: str) -> Curriculum:
    """The shipped curriculum of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return CURRICULA.get(kind) or import_path(kind, "batcher.curriculum.kind", CURRICULA)


def stage_of(rules: Rules, reached: int, batch: int) -> int:
    """The stage of a batch, the stage `reached` by rewards or one that its number has brought."""
    stage, last = min(reached, len(rules.stages) - 1), len(rules.stages) - 1
    while stage < last and 0 < rules.stages[stage].until_batch <= batch:
        stage += 1
    return max(stage, 0)


def learned(rules: Rules, progress: Progress, batch: Batch) -> Progress:
    """The progress when this batch has been made too: it reaches one goal at most, so that each
    stage is tried.
    """
    rewards = {env: list(of_env) for env, of_env in progress.rewards.items()}
    for env, reward in rewards_of(batch).items():
        rewards[env] = [*rewards.get(env, []), reward][-rules.memory :]
    stage = stage_of(rules, progress.stage, batch.number)
    if stage < len(rules.stages) - 1 and reached(
        rules.stages[stage].until, rewards, CLOSE if rules.version else 0.0
    ):
        stage += 1
    return Progress(stage, rewards)


def reached(goal: Goal | None, rewards: Mapping[str, list[float]], close: float = CLOSE) -> bool:
    """Over as many batches as the goal says, not fewer."""
    if goal is None:
        return False
    last = rewards.get(goal.env, [])[-goal.batches :]
    return len(last) == goal.batches and reaches(mean(last), goal.reward, close)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def rewards_of(batch: Batch) -> dict[str, float]:
    """Mean reward of each env's rollouts in a batch."""
    envs, first = batch.group_environments[batch.groups], heads(batch.uids)
    return {
        env: float(np.mean(batch.rewards[first & (envs == i)], dtype=np.float64))
        for i, env in enumerate(batch.environments)
    }
