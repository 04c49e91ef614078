"""A line a step, for whoever watches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from streamrl.config import topology
from streamrl.monitoring.sinks.base import Entry, Place

SHOWN = (
    "batches/*/reward/mean",
    "learner/loss",
    "learner/grad_norm",
    "learner/step_s",
    "learner/idle_s",
    "batcher/batch_age_mean",
)
KEPT = 64  # steps that are not said yet, as the learner is behind the batcher


class Console:
    """Says a step when the lead learner has finished it, by what is known of it then. What happened
    before this session is not said again.
    """

    def __init__(self, place: Place, show: Sequence[str] = SHOWN) -> None:
        """`show`: names of metrics, with * for anything, in the order in which they are said."""
        self._place, self._show = place, tuple(show)
        self._lead = topology.learner_identity(place.run.learner.name)
        self._values: dict[int, dict[str, float]] = defaultdict(dict)
        self._said = -1

    def take(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for row in entry.rows:
                self._values[row.step] |= row.values
            step = entry.metric.step
            if (
                entry.metric.source == self._lead
                and step is not None
                and step > self._said
                and entry.metric.time_s >= self._place.since_s
            ):
                self._said = step
                self._place.say(f"step {step}: {self._line(self._values[step])}")
            for old in sorted(self._values)[:-KEPT]:
                del self._values[old]

    def close(self) -> None: ...

    def _line(self, values: dict[str, float]) -> str:
        names = [name for pattern in self._show for name in values if fnmatchcase(name, pattern)]
        return (
            ", ".join(f"{name} {values[name]:.4g}" for name in dict.fromkeys(names))
            or "nothing of what is to be shown"
        )
