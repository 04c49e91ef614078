"""Which processes a run consists of, and what to do when one has ended. Pure: `supervisor.py` does
what `decide` says.
"""

from __future__ import annotations

import signal
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import Orchestrator
from streamrl.config.topology import Part
from streamrl.errors import (
    AccessDenied,
    BrokerUnreachable,
    ConfigError,
    Fenced,
    ModelError,
    TrainingDiverged,
    TransactionFailed,
    VersionMismatch,
)

BROKER = "broker"
BROKER_PART = Part(BROKER, BROKER, BROKER)  # no role: it may be somebody else's
LONG_LIFE_S = 30.0  # a part that lived so long was well: its next end is the first in a row
MAX_BACKOFF_S = 10.0
HOPELESS = {
    Fenced.exit_code: "another process has its identity; stop that one first",
    ConfigError.exit_code: "its settings do not work, and a restart does not change them",
    AccessDenied.exit_code: "the broker refuses it, and a restart does not change that",
    ModelError.exit_code: "its model cannot be loaded, and a restart does not change that",
    TrainingDiverged.exit_code: "training has diverged, and a restart trains on the same batches again",
    VersionMismatch.exit_code: "it computes an announced version differently, and learner.on_divergence is stop",
}
"""Exit codes after which a restart is of no use, or harmful: two supervisors would fence each
other's parts in turn.
"""

BROKER_GONE = (TransactionFailed.exit_code, BrokerUnreachable.exit_code)
"""Exit codes of a part that had no broker to work with. An outage may last: such ends do not count
against `restart_limit`.
"""


class End(NamedTuple):
    """One life of a part is over."""

    time_s: float  # by a clock that nobody sets
    lived_s: float
    exit_code: int  # negative: the signal that ended it


@dataclass(frozen=True)
class Observed:
    """A part as it stands: running or not, and how often it has ended, oldest first."""

    running: bool = False
    ends: tuple[End, ...] = ()
    hangs: str = ""  # why it is to be ended although it runs


class Start(NamedTuple):
    name: str


class GiveUp(NamedTuple):
    """The run cannot go on without this part."""

    name: str
    reason: str


class Kill(NamedTuple):
    """A part that runs and does nothing any more. It is started again once it has ended."""

    name: str
    reason: str


Action = Start | GiveUp | Kill


def stop_order(names: Iterable[str]) -> list[list[str]]:
    """Parts in the order they are stopped: those that ask before those that answer, the broker
    last. Each list at once.
    """
    waves: list[list[str]] = [[], [], []]
    for name in names:
        waves[2 if name == BROKER else 0 if name.startswith(f"{topology.ENV.name}-") else 1].append(
            name
        )
    return [wave for wave in waves if wave]


def decide(
    limits: Orchestrator, parts: Iterable[str], observed: Mapping[str, Observed], time_s: float
) -> list[Action]:
    """What is to be done now so that all `parts` run. A part in its back-off gets nothing yet."""
    actions: list[Action] = []
    for name in parts:
        part = observed.get(name, Observed())
        if part.running:
            actions += [Kill(name, part.hangs)] if part.hangs else []
        elif reason := hopeless(limits, part, time_s, () if name == BROKER else BROKER_GONE):
            actions.append(GiveUp(name, reason))
        elif not part.ends or time_s >= part.ends[-1].time_s + backoff(limits, part.ends):
            actions.append(Start(name))
    return actions


def hopeless(
    limits: Orchestrator, part: Observed, time_s: float, uncounted: Container[int] = ()
) -> str:
    """Why this part is not to be started again; empty when it is. `uncounted`: exit codes that do
    not count against the limit.
    """
    if not part.ends:
        return ""
    last = part.ends[-1]
    if last.exit_code in HOPELESS:
        return HOPELESS[last.exit_code]
    recent = sum(
        end.time_s > time_s - limits.restart_window_s and end.exit_code not in uncounted
        for end in part.ends
    )
    if recent > limits.restart_limit:
        often = f"ended {recent} times within {limits.restart_window_s:.0f} s, last with {how(last.exit_code)}"
        return f"{often}; orchestrator.restart_limit is {limits.restart_limit}"
    return ""


def backoff(limits: Orchestrator, ends: tuple[End, ...]) -> float:
    """Seconds from the last end to the next start: doubling with every short life in a row. A
    failed transaction that comes alone costs nothing.
    """
    in_a_row = 0
    for end in reversed(ends):
        in_a_row += 1
        if end.lived_s >= LONG_LIFE_S:
            break
    if in_a_row == 1 and ends[-1].exit_code == TransactionFailed.exit_code:
        return 0.0
    return min(limits.backoff_s * 2 ** (in_a_row - 1), MAX_BACKOFF_S)


def how(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
