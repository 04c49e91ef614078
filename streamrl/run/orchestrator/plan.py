"""Decides which parts to start, to kill and to give up. Pure: `supervisor.py` acts on it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.topology import Part
from streamrl.system.errors import (
    AccessDenied,
    BrokerUnreachable,
    ConfigError,
    Fenced,
    ModelError,
    TrainingDiverged,
    TransactionFailed,
    VersionMismatch,
)

INTERRUPTED = 130  # the exit code of a run that was stopped
BROKER = "broker"
BROKER_PART = Part(BROKER, BROKER, BROKER)  # not a role, as the run may use an existing cluster
# Restarts of one part within RESTART_WINDOW_S, or in a row without its having done any work. One
# more ends the run.
RESTART_LIMIT = 20
RESTART_WINDOW_S = 300.0
BACKOFF_S = 0.2  # pause before a restart; it doubles at each restart in a row
LONG_LIFE_S = 30.0  # a part that ran for so long was healthy, so its back-off begins anew
MAX_BACKOFF_S = 10.0
GIB = 1 << 30
STOP_LIMIT_S = 15.0  # between asking a part to end and ending it
LEARNER_STOP_LIMIT_S = 600.0  # the same of a learner: a step of a real model may take minutes
FATAL = {
    Fenced.exit_code: "another process has its identity; stop that one first",
    ConfigError.exit_code: "its settings do not work, and a restart does not change them",
    AccessDenied.exit_code: "the broker refuses it, and a restart does not change that",
    ModelError.exit_code: "its model cannot be loaded, and a restart does not change that",
    TrainingDiverged.exit_code: (
        "training has diverged, and a restart trains on the same batches again"
    ),
    VersionMismatch.exit_code: (
        "it computes an announced version differently, and learner.on_divergence is stop"
    ),
}
"""Exit codes after which a restart does not help, each with the reason.

After `Fenced` a restart would do harm: two supervisors would fence each other's parts in turn.
"""

BROKER_GONE = (TransactionFailed.exit_code, BrokerUnreachable.exit_code)
"""Exit codes of a part that could not reach its broker.

They do not count against RESTART_LIMIT while the broker does not answer the orchestrator either,
because an outage may last.
"""

# A part that ran for so long counts as one that has done work, also where its pages are not served.
STABLE_LIFE_S = 3600.0


class Exit(NamedTuple):
    """One end of a part's process."""

    time_s: float  # by a monotonic clock
    lived_s: float
    exit_code: int  # the negative number of the signal, if a signal ended it
    killed: bool = False  # by the orchestrator, because the part was hanging
    held_bytes: int = 0  # resident memory when it was last seen alive; 0 if it never was
    progressed: bool = False  # whether it was seen to answer that it had done work
    broker_answered: bool = False  # whether the broker answered the orchestrator as it ended


@dataclass(frozen=True)
class PartState:
    """Whether a part runs, and its earlier exits, the oldest first."""

    running: bool = False
    ends: tuple[Exit, ...] = ()
    hangs: str = ""  # the reason to end it although it runs


class Start(NamedTuple):
    name: str


class Abort(NamedTuple):
    """The run cannot continue without this part."""

    name: str
    reason: str


class Kill(NamedTuple):
    """End a part that hangs. It is started again once its process has ended."""

    name: str
    reason: str


Action = Start | Abort | Kill


def stop_limit_s(name: str) -> float:
    """Seconds that a part has from SIGTERM to its end. A learner finishes its step and writes a
    checkpoint, without which the steps since the last one would be lost.
    """
    learner = topology.LEARNER.name
    is_learner = name == learner or name.startswith(f"{learner}-")
    return LEARNER_STOP_LIMIT_S if is_learner else STOP_LIMIT_S


def stop_order(names: Iterable[str]) -> list[list[str]]:
    """The parts in the order in which they are stopped, those of one list at the same time.

    Envs stop before the servers that answer them, and the broker stops last.
    """
    envs: list[str] = []
    others: list[str] = []
    brokers: list[str] = []
    for name in names:
        if name == BROKER:
            brokers.append(name)
        elif name.startswith(f"{topology.ENV.name}-"):
            envs.append(name)
        else:
            others.append(name)
    return [wave for wave in (envs, others, brokers) if wave]


def decide(
    parts: Iterable[str],
    observed: Mapping[str, PartState],
    time_s: float,
    gang: Sequence[str] = (),
) -> list[Action]:
    """The actions that are due now so that all `parts` run. A part in its back-off gets no action
    yet.

    `gang`: those of the parts that run together or not at all. When one ends, the others are ended
    too, and then all are started again.
    """
    actions: list[Action] = []
    for name in parts:
        if name not in gang:
            actions += _decide_together([name], observed, time_s)
        elif name == gang[0]:
            actions += _decide_together(gang, observed, time_s)
    return actions


def _decide_together(
    names: Sequence[str],
    observed: Mapping[str, PartState],
    time_s: float,
) -> list[Action]:
    """What to do with parts that run together or not at all; most often it is one part."""
    parts = [observed.get(name, PartState()) for name in names]
    ended = [name for name, part in zip(names, parts, strict=True) if not part.running]
    if len(ended) < len(names):
        return _kills(names, parts, ended)
    ends = gang_ends(parts)
    if reason := fatal_reason(ends, time_s, names[0] == BROKER):
        last = [part.ends[-1] for part in parts]
        return [Abort(names[last.index(cause_of_end(last))], reason)]
    if not ends or time_s >= ends[-1].time_s + backoff(ends):
        return [Start(name) for name in names]
    return []


def _kills(names: Sequence[str], parts: Sequence[PartState], ended: Sequence[str]) -> list[Action]:
    """The parts to end: those that hang, and those that run on although another has ended."""
    actions: list[Action] = []
    for name, part in zip(names, parts, strict=True):
        if part.running and part.hangs:
            actions.append(Kill(name, part.hangs))
        elif part.running and ended:
            actions.append(Kill(name, f"{ended[0]} has ended, and they run together"))
    return actions


def gang_ends(parts: Sequence[PartState]) -> tuple[Exit, ...]:
    """The ends of a gang whose parts have all ended. Each of them is the end of the part that the
    others followed. The gang has done work if one of its parts has.
    """
    return tuple(
        cause_of_end(ends)._replace(progressed=any(end.progressed for end in ends))
        for ends in zip(*(part.ends for part in parts), strict=False)
    )


def cause_of_end(ends: Sequence[Exit]) -> Exit:
    """The end of the part of a gang that the others followed: the one that gave up, or else the
    first that ended.
    """
    return min(ends, key=lambda end: (end.exit_code not in FATAL, end.time_s))


def fatal_reason(ends: Sequence[Exit], time_s: float, is_broker: bool = False) -> str:
    """The reason not to start a part with these ends again, empty if there is none.

    A part may end RESTART_LIMIT times within RESTART_WINDOW_S. It may also end as often in a row
    without having done any work, however long each life lasted and whether or not it was ready: a
    learner may be ready, and then end in its first step. An end for want of a broker does not
    count if the broker did not answer the orchestrator either.
    """
    if not ends:
        return ""
    last = ends[-1]
    if last.exit_code in FATAL:
        return FATAL[last.exit_code]
    recent = 0
    idle = 0
    in_a_row = True
    for end in reversed(ends):
        in_a_row = in_a_row and not (end.progressed or end.lived_s >= STABLE_LIFE_S)
        if is_broker or end.broker_answered or end.exit_code not in BROKER_GONE:
            recent += end.time_s > time_s - RESTART_WINDOW_S
            idle += in_a_row
    if max(recent, idle) <= RESTART_LIMIT:
        return ""
    if recent > RESTART_LIMIT:
        often = f"ended {recent} times within {RESTART_WINDOW_S:.0f} s"
    else:
        often = f"ended {idle} times in a row without having done any work"
    away = ", although the broker answers" if last.exit_code in BROKER_GONE else ""
    return (
        f"{often}, last with {describe_exit(last)}{away}; at most {RESTART_LIMIT} restarts are made"
    )


def backoff(ends: tuple[Exit, ...]) -> float:
    """Seconds from the last exit to the next start.

    They double with every short life in a row. A single failed transaction causes no wait.
    """
    in_a_row = 0
    for end in reversed(ends):
        in_a_row += 1
        if end.lived_s >= LONG_LIFE_S:
            break
    if in_a_row == 1 and ends[-1].exit_code == TransactionFailed.exit_code:
        return 0.0
    return min(BACKOFF_S * 2 ** (in_a_row - 1), MAX_BACKOFF_S)


def describe_exit(end: Exit) -> str:
    """An exit code or a signal as text, with the memory of a part that may have had too much."""
    if end.exit_code >= 0:
        return f"exit code {end.exit_code}"
    try:
        name = signal.Signals(-end.exit_code).name
    except ValueError:
        return f"signal {-end.exit_code}"
    if end.exit_code != -signal.SIGKILL or end.killed:
        return name
    held = f"; it last held {end.held_bytes / GIB:.1f} GiB" if end.held_bytes else ""
    return f"{name} (from the kernel, for lack of memory, or by hand{held})"
