"""The configuration and the state of the assembler.

Journals have AssemblerConfig as JSON and snapshots have AssemblerState, both by the names of the
fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from streamrl.log.protocol import Event


@dataclass(frozen=True)
class SessionRules:
    """When a session of an env is over, and what it waits for."""

    rewards: tuple[str, ...]  # names that a rollout waits for; empty: any one
    reward_weights: dict[str, float]  # any other name has weight 1
    idle_s: float  # a session without a record for so long is ended
    reward_wait_s: float  # a session that has ended fails without its rewards after so long
    group_size: int  # rollouts of a problem that are compared with each other


@dataclass(frozen=True)
class AssemblerConfig:
    envs: dict[str, SessionRules]


class OpenSession(msgspec.Struct):
    """A session that is no rollout yet. Its records are kept as they came."""

    start: Event
    problem_id: str
    group_id: str
    last_s: float  # when its last record was taken
    calls: list[Event] = []
    rewards: list[Event] = []
    end: Event | None = None


class UnclaimedRewards(msgspec.Struct):
    """Rewards of a session that has not begun: they lie in another topic, so they may come first.
    Rewards that come after the rollout was made are here too, until they are put aside.
    """

    since_s: float
    rewards: list[Event] = []


class PartialGroup(msgspec.Struct):
    """A group to which sessions of a problem are still added."""

    group_id: str
    sessions: int
    last_s: float


class EnvSessions(msgspec.Struct):
    """The open sessions of one env, and the rewards and groups that wait for sessions."""

    open: dict[str, OpenSession] = {}
    unclaimed: dict[str, UnclaimedRewards] = {}
    groups: dict[str, PartialGroup] = {}  # by problem


class AssemblerState(msgspec.Struct):
    envs: dict[str, EnvSessions] = {}
    checked_s: float = -1.0  # when the time limits were last checked
