"""The configuration and the state of the assembler.

Journals have AssemblerConfig as JSON and snapshots have AssemblerState, both by the names of the
fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from streamrl.envs.sessions.reward_progress import RewardProgress
from streamrl.stream.log.protocol import Event
from streamrl.stream.processor.awake_clock import AwakeClock


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
    last_s: float  # awake, when its last record was taken
    calls: list[Event] = []
    rewards: dict[str, dict[str, Event]] = {}  # the last one of each name and call
    progress: RewardProgress = msgspec.field(default_factory=RewardProgress)
    end: Event | None = None
    # The last start after the first one. It is held for the gateway, which reads what is held.
    restart: Event | None = None
    is_closing: bool = False  # its last end has been written, and not yet read


class PartialGroup(msgspec.Struct):
    """A group to which sessions of a problem are still added."""

    group_id: str
    sessions: int
    last_s: float


class EnvSessions(msgspec.Struct):
    """The open sessions of one env, and the groups that wait for sessions."""

    open: dict[str, OpenSession] = {}
    groups: dict[str, PartialGroup] = {}  # by problem


class RemovedSession(msgspec.Struct):
    """A session that was open when its env was taken out of the run."""

    session: str
    problem_id: str
    group_id: str


class AssemblerState(msgspec.Struct):
    envs: dict[str, EnvSessions] = {}
    # By env. Their rollouts are published, as failed, when the env is put back.
    sessions_of_removed_envs: dict[str, list[RemovedSession]] = {}
    clock: AwakeClock = msgspec.field(default_factory=AwakeClock)  # limits on waiting go by it
    checked_s: float = -1.0  # awake, when the limits were last checked
