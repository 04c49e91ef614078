"""What the records of a run tell about its parts: the facts that a simulation needs. `reading.py`
makes them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Request(NamedTuple):
    """A request that a server has answered, in seconds since the epoch."""

    begun: float
    ended: float
    tokens: tuple[int, ...]  # of each answer, at least 1


class Engine(msgspec.Struct, frozen=True):
    """The speed of a server, in seconds. None of them is below 0."""

    overhead_s: float  # of a request
    token_s: float  # for a token of each sequence
    sequence_s: float  # on top of that, for each sequence that runs

    def step_s(self, sequences: int) -> float:
        """The time of one token of each of so many sequences."""
        return self.token_s + self.sequence_s * sequences


class Call(msgspec.Struct, frozen=True):
    """A request of a rollout to the policy."""

    wait_s: float  # from the answer before, or from the beginning of the rollout
    tokens: int  # of the answer


class SampledRollout(msgspec.Struct, frozen=True):
    """A rollout as it was sampled. One that failed has no tokens."""

    calls: list[Call]
    tokens: int  # that it takes in a batch, prompts included
    reward: float


class SampledGroup(msgspec.Struct, frozen=True):
    """A group as it was sampled."""

    rollouts: list[SampledRollout]
    end_s: float  # from its last answer to its records


class Step(msgspec.Struct, frozen=True):
    """A step of the learner, in seconds from its end: the others follow `train_s`."""

    train_s: float
    publish_s: float  # until the learner may take the next batch
    announce_s: float  # until the version is announced


class Load(msgspec.Struct, frozen=True):
    """How a server loads a version."""

    delay_s: float  # from its announcement to the pause
    pause_s: float


class Facts(msgspec.Struct, frozen=True):
    """The parts of a run, as they were measured. Every list has at least one member, but for a run
    whose servers have loaded no version while they were asked.
    """

    steps: list[Step]
    loads: list[Load]
    engines: dict[str, Engine]  # by pool
    servers: dict[str, int]  # that have answered, by pool
    groups: dict[str, list[SampledGroup]]  # by env
    hops_s: list[float]  # from a part that makes a record to the next one that reads it
    fractions: dict[str, float]  # of the envs, where a curriculum decides them; otherwise empty


class Measured(msgspec.Struct, frozen=True):
    """What a run did, to compare a simulation with."""

    steps: int
    steps_per_s: float
    tokens_per_s: float  # sampled
    expired_frac: float  # of these tokens
    learner: dict[str, float]  # share of each cause in the time of the learner
    servers: dict[str, float]  # the same of all servers together


def with_learner_speed(facts: Facts, factor: float) -> Facts:
    """The facts with a learner that trains so many times as fast."""
    steps = [msgspec.structs.replace(step, train_s=step.train_s / factor) for step in facts.steps]
    return msgspec.structs.replace(facts, steps=steps)
