"""Sessions of agents: how they ended, and why their conversations forked, counted by step from the
rollouts that the assembler makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.extensions.dashboard.steps import StepCounter, Steps
from streamrl.stream.records import Rollout

FORKS = ("template", "edit", "compaction", "sub-agent")
FINISHED = "finished"
OTHER = "for other reasons"
MOST_ENDS = 8  # Agents give any reasons. So many different ends are counted by name.
END_LENGTH = 80  # characters of a reason that are kept


class SessionCounts:
    """The sessions of one env that have become rollouts."""

    def __init__(self) -> None:
        self._ends = dict[str, StepCounter]()
        self._forks = {cause: StepCounter() for cause in FORKS}

    def add(self, rollout: Rollout, step: int) -> None:
        """Count a session whose rollout was published in `step`."""
        end = end_of(rollout)
        if end not in self._ends and len(self._ends) >= MOST_ENDS:
            end = OTHER
        self._ends.setdefault(end, StepCounter()).add(step, 1)
        for cause, count in forks_of(rollout).items():
            self._forks[cause].add(step, count)

    def regroup(self, steps: Steps) -> None:
        """Keep only the counts at the ends of the pieces of `steps`."""
        for counter in (*self._ends.values(), *self._forks.values()):
            counter.regroup(steps)

    def ends(self, step: int | None = None) -> dict[str, int]:
        """The number of sessions by how they ended, at the end of `step` or now."""
        return _until(self._ends, step)

    def forks(self, step: int | None = None) -> dict[str, int]:
        """The number of forks by their cause, at the end of `step` or now."""
        return _until(self._forks, step)


def end_of(rollout: Rollout) -> str:
    """How a session ended: by itself, at a limit, or without anything to train on."""
    if rollout.failure:
        return f"failed: {rollout.failure}"[:END_LENGTH]
    if rollout.truncated:
        return f"cut off: {rollout.metadata.get('truncation', '')}"[:END_LENGTH]
    return FINISHED


def forks_of(rollout: Rollout) -> dict[str, int]:
    """The forks of a session's conversations by their cause. Agents may write into the metadata
    what they like, so that only numbers are counted.
    """
    forks = rollout.metadata.get("forks")
    if not isinstance(forks, dict):
        return {}
    counts: Mapping[Any, Any] = forks
    return {cause: count for cause in FORKS if isinstance(count := counts.get(cause), int)}


def _until(counters: Mapping[str, StepCounter], step: int | None) -> dict[str, int]:
    counts = {name: counter.until(step) for name, counter in counters.items()}
    return {name: count for name, count in counts.items() if count}
