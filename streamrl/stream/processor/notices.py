"""Warnings about records that were not used: how many rollouts failed, how many records were
dead-lettered, and the last cause of each.

All of these records are in `fates` and in dead letters. The warnings are there so that a producer
that sends nothing useful is noticed without looking for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from streamrl.config import topology
from streamrl.stream.log.dead_letters import DeadLetter
from streamrl.stream.records import Fate
from streamrl.system.text import printable

EVERY_S = 10.0  # between two warnings


class Notices:
    """Counts since the last warnings, by the env or the topic that the records are of."""

    def __init__(self) -> None:
        self._failed = Counter[str]()
        self._dead_lettered = Counter[str]()
        # env or topic -> "failed" or "dead-lettered" -> the last cause
        self._causes: defaultdict[str, dict[str, str]] = defaultdict(dict[str, str])
        self._warned_s: float | None = None

    def count(self, failed: Iterable[Fate], letters: Iterable[DeadLetter]) -> None:
        for fate in failed:
            self._failed[fate.environment] += len(fate.offsets)
            self._causes[fate.environment]["failed"] = fate.cause
        for letter in letters:
            name = letter.topic.removeprefix(topology.rollouts(""))
            self._dead_lettered[name] += 1
            self._causes[name]["dead-lettered"] = letter.cause

    def due(self, now_s: float) -> list[str]:
        """The warnings that are due: the first at once, the next ones every `EVERY_S`. `now_s` is
        by a monotonic clock.
        """
        if not self._causes or (self._warned_s is not None and now_s - self._warned_s < EVERY_S):
            return []
        self._warned_s = now_s
        warnings = [self._warning(name) for name in self._causes]
        self._failed.clear()
        self._dead_lettered.clear()
        self._causes.clear()
        return warnings

    def _warning(self, name: str) -> str:
        counts = {"failed": self._failed[name], "dead-lettered": self._dead_lettered[name]}
        parts = [
            f"{counts[what]:,} {what} (last: {printable(cause) or 'no cause given'})"
            for what, cause in self._causes[name].items()
        ]
        hint = ": `streamrl dead-letters list RUN`" if counts["dead-lettered"] else ""
        return f"{name}: {', '.join(parts)}{hint}"
