"""What the orchestrator knows of its run from one poll to the next, and what is due. Pure: it is
told what was read, how far, and the time; `process.py` reads, shows and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.metric_validation import validate_metric
from streamrl.run.monitoring.run_view import RunView, update_view
from streamrl.run.monitoring.verdict import Verdict, run_finished
from streamrl.stream.log.protocol import Event, Offsets
from streamrl.stream.records import Metric

SHOW_EVERY_S = 0.5
MEASURE_EVERY_S = 1.0


class RunWatch:
    """The view of a run, and whether it is over."""

    def __init__(self, run: RunFile, view: RunView, history: Offsets) -> None:
        """`history` has the end offsets at the beginning. The records below them are dated by the
        clocks of their writers.
        """
        self.view = view
        self._limits = run.orchestrator
        self._history = dict(history)
        self._measured_s = 0.0
        self._shown_s = 0.0

    def on_events(self, events: Sequence[Event], now: float) -> None:
        update_view(self.view, events, None if self._history else now)

    def metrics(self, events: Sequence[Event]) -> Iterator[tuple[int, Metric]]:
        """The metrics among the events that can be genuine, with their offsets."""
        for event in events:
            metric = validate_metric(event, self.view.version)
            if metric:
                yield event.offset, metric

    def on_position(self, position: Callable[[str, int], int]) -> None:
        """Note how far each partition has been read."""
        self._history = {tp: end for tp, end in self._history.items() if position(*tp) < end}

    def verdict(self, now: float) -> Verdict | None:
        return run_finished(self._limits, self.view, now)

    def measure_due(self, now: float) -> bool:
        """Whether the run is to be measured now, which counts as done then. Before all history is
        read, the counts are not the current ones.
        """
        if self._history or now - self._measured_s < MEASURE_EVERY_S:
            return False
        self._measured_s = now
        return True

    def show_due(self, now: float) -> bool:
        """Whether the run is to be shown now, which counts as done then."""
        if now - self._shown_s < SHOW_EVERY_S:
            return False
        self._shown_s = now
        return True
