"""How much of a batch each env gets in the course of training. The number of the batch decides, and
the rewards in the batches before it.

Both are in the batcher's own log, so restart, replay and fork come to the same shares. A curriculum
maps (rules, state, number of a batch) to the envs' fractions of its tokens, and is pure. An env
that it does not name has no fraction, and what the fractions leave goes by availability. A
curriculum that is not shipped is named in the run file as MODULE:FUNCTION. docs/data.md explains
how to choose.

The journal has CurriculumRules and snapshots have CurriculumState, both by the names of the fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from streamrl.config.choices import CURRICULA
from streamrl.config.goals import reaches
from streamrl.config.plugins import import_choice
from streamrl.stream.records import Batch, mean_rewards


@dataclass(frozen=True)
class RewardTarget:
    """A mean reward of an env over the last `batches` batches that had it."""

    env: str
    reward: float
    batches: int


@dataclass(frozen=True)
class CurriculumStage:
    """Fractions by env until a batch or a reward target, whichever comes first."""

    fractions: dict[str, float]
    until_batch: int = 0  # the first batch that is not of this stage; 0: no number ends it
    until: RewardTarget | None = None


@dataclass(frozen=True)
class CurriculumRules:
    """The curriculum of a run."""

    kind: str = "none"
    envs: tuple[str, ...] = ()
    stages: tuple[CurriculumStage, ...] = ()
    batches: int = 10  # that the mean reward of an env is taken over
    least: float = 0.0  # fraction of each env (learnability)

    @property
    def memory(self) -> int:
        """The number of batches whose rewards are remembered."""
        targets = [stage.until for stage in self.stages if stage.until]
        return max([self.batches, *(target.batches for target in targets)])


class CurriculumState(msgspec.Struct, frozen=True):
    """What is remembered of the batches up to now."""

    stage: int = 0
    # mean reward of an env in each of the last batches that had it, the oldest first
    rewards: dict[str, list[float]] = {}


Curriculum = Callable[[CurriculumRules, CurriculumState, int], Mapping[str, float]]


def stages(rules: CurriculumRules, state: CurriculumState, batch: int) -> Mapping[str, float]:
    """The fractions of the stage that the batch belongs to."""
    return rules.stages[stage_of(rules, state.stage, batch)].fractions


def learnability(rules: CurriculumRules, state: CurriculumState, batch: int) -> dict[str, float]:
    """Fractions in proportion to r (1 - r), where r is the env's mean reward, clipped to 0 and 1.
    An env that is won half the time gets most; one that is always or never won gets `least`.

    For a success of 0 or 1 this is the variance of the reward, which is what a policy gradient
    feeds on. An env that has not been in a batch counts as won half the time. Sampling for
    Learnability, arXiv:2408.15099.
    """
    weights = dict[str, float]()
    for env in rules.envs:
        known = state.rewards.get(env, [])[-rules.batches :]
        won = min(max(mean(known or [0.5]), 0.0), 1.0)
        weights[env] = won * (1 - won)
    total = math.fsum(weights.values())
    free = 1 - rules.least * len(weights)
    return {
        env: rules.least + free * (weight / total if total else 1 / len(weights))
        for env, weight in weights.items()
    }


def fractions_of(rules: CurriculumRules, state: CurriculumState, batch: int) -> dict[str, float]:
    """The fraction of each env in batch number `batch`. Raises ValueError naming the batch where
    the curriculum does not return fractions of the run's envs.
    """
    fractions = curriculum_named(rules.kind)(rules, state, batch)
    valid = all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions.values())
    whole = valid and math.fsum(fractions.values()) <= 1 + 1e-9
    if not whole or not fractions.keys() <= set(rules.envs):
        raise ValueError(
            f"batch {batch}: batcher.curriculum {rules.kind} gave {dict(fractions)}, "
            f"no fractions of {', '.join(rules.envs)}"
        )
    return {env: float(fractions.get(env, 0.0)) for env in rules.envs}


def curriculum_named(kind: str) -> Curriculum:
    """The shipped curriculum of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return import_choice(kind, "batcher.curriculum.kind", CURRICULA)


def stage_of(rules: CurriculumRules, reached: int, batch: int) -> int:
    """The stage of a batch: the one `reached` by rewards, or a later one that the number of the
    batch has brought.
    """
    last = len(rules.stages) - 1
    stage = min(reached, last)
    while stage < last and 0 < rules.stages[stage].until_batch <= batch:
        stage += 1
    return max(stage, 0)


def advance(rules: CurriculumRules, state: CurriculumState, batch: Batch) -> CurriculumState:
    """The state after this batch. It reaches one target at most, so that each stage is tried."""
    rewards = {env: list(known) for env, known in state.rewards.items()}
    for env, reward in mean_rewards(batch).items():
        rewards[env] = [*rewards.get(env, []), reward][-rules.memory :]
    stage = stage_of(rules, state.stage, batch.number)
    if stage < len(rules.stages) - 1 and target_reached(rules.stages[stage].until, rewards):
        stage += 1
    return CurriculumState(stage, rewards)


def target_reached(target: RewardTarget | None, rewards: Mapping[str, list[float]]) -> bool:
    """Has the env as many batches as the target asks for, and the mean reward over them? A mean
    that is below the target by rounding only has reached it.
    """
    if target is None:
        return False
    last = rewards.get(target.env, [])[-target.batches :]
    return len(last) == target.batches and reaches(mean(last), target.reward)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
