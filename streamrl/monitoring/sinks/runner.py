"""Runs the sinks of a run in a thread of their own.

A server that does not answer must not keep the orchestrator from its parts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from streamrl.config import run_file, topology
from streamrl.config.plugins import import_path
from streamrl.errors import ConfigError, describe_error
from streamrl.monitoring.sinks.base import MetricRecord, Sink, SinkContext, SinkFactory
from streamrl.monitoring.sinks.curve import Curves
from streamrl.records import Metric

logger = logging.getLogger(__name__)

SHIPPED = {
    "console": "Console",
    "jsonl": "JsonLines",
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "mlflow": "MLflow",
}
"""Name in the run file, which is that of the file -> class."""
# Sink -> the package it needs. The extra of streamrl that brings it has the sink's name.
NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
LEAVE_S = 30.0  # the time that sinks have at the end to write what they were given

Named = tuple[str, Sink]


@contextlib.contextmanager
def running(context: SinkContext) -> Iterator[Sinks]:
    """Open the sinks of the run file for as long as the block lasts.

    Raises ConfigError for a sink that cannot be opened.
    """
    sinks = Sinks(
        [(sink.kind, opened(context, sink)) for sink in context.run.orchestrator.sinks],
        topology.learner_identity(context.run.learner.name),
    )
    try:
        yield sinks
    finally:
        sinks.close()


def check(settings: Iterable[run_file.Sink]) -> None:
    """Raise ConfigError if a sink cannot be imported. Called before anything is started."""
    for sink in settings:
        _make(sink.kind)


def opened(context: SinkContext, sink: run_file.Sink) -> Sink:
    """Open one sink. Raises ConfigError whatever does not work.

    Nobody wants to find out after a day that nothing was kept.
    """
    try:
        return _make(sink.kind)(context, **sink.params)
    except ConfigError:
        raise
    except Exception as error:
        told = describe_error(error)
        raise ConfigError(
            f"orchestrator.sinks: {sink.kind} cannot be opened: {told}; change its params, or leave"
            " it out"
        ) from None


def _make(kind: str) -> SinkFactory:
    if kind not in SHIPPED:
        return import_path(kind, "orchestrator.sinks", SHIPPED)
    try:
        return getattr(importlib.import_module(f"streamrl.monitoring.sinks.{kind}"), SHIPPED[kind])
    except ImportError as error:
        needs = f"the package {NEEDS.get(kind, kind)} ({error}): pip install 'streamrl[{kind}]'"
        raise ConfigError(f"orchestrator.sinks: {kind} needs {needs}, or leave it out") from None


class Sinks:
    """Hands metric records to all sinks, in the order of the topic.

    A sink that fails is logged and gets no more records, and the run goes on.
    """

    def __init__(self, sinks: Sequence[Named], lead: str) -> None:
        self._sinks, self._curves = list(sinks), Curves(lead)
        self._queue: queue.SimpleQueue[list[MetricRecord] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
        self._thread.start()

    def write(self, records: Iterable[tuple[int, Metric]]) -> None:
        """`records` are pairs of an offset and the record at that offset."""
        if entries := [self._curves.entry(offset, metric) for offset, metric in records]:
            self._queue.put(entries)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(LEAVE_S)
        if self._thread.is_alive():
            logger.warning(
                "sinks have not taken everything within %.0f s; the next session of the run hands"
                " it to them again",
                LEAVE_S,
            )

    def _work(self) -> None:
        while (entries := self._queue.get()) is not None:
            self._sinks = [
                named
                for named in self._sinks
                if self._done(named, lambda sink, given=entries: sink.write(given))
            ]
        for named in self._sinks:
            self._done(named, lambda sink: sink.close())

    def _done(self, named: Named, call: Callable[[Sink], None]) -> bool:
        try:
            call(named[1])
        except Exception as error:
            again = "the next session of the run hands it what it lacks"
            logger.error(
                "sink %s is left out from now on: %s; %s",
                named[0],
                describe_error(error),
                again,
            )
            return False
        return True
