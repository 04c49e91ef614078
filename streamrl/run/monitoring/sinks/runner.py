"""Runs the sinks of a run in a separate thread, and notes how far each has come.

A server that does not answer must not keep the orchestrator from its parts.

Every record is written at least once. A sink may keep in memory for a while what it is given, so
an offset is noted only when it is NOTE_AFTER_S old, or when the sink is closed. The next session
continues after it. Notes are kept by the settings of a sink, so a sink that is to write to another
place is given everything.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from streamrl.config import topology
from streamrl.config.choices import SINKS
from streamrl.config.plugins import import_path, plugins
from streamrl.config.sections.operation import SinkSetting
from streamrl.run.monitoring.sinks.base import MetricRecord, Sink, SinkContext, SinkFactory
from streamrl.run.monitoring.sinks.curve import Curves
from streamrl.stream.records import Metric
from streamrl.system.errors import ConfigError, describe_error
from streamrl.system.files import write_atomically

logger = logging.getLogger(__name__)

# Sink -> the package it needs. The extra of streamrl that brings it has the sink's name.
NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
LEAVE_S = 30.0  # the time that sinks have at the end to write what they were given
NOTES = "sinks.json"  # the last offset that each sink has written, in the run's directory
NOTE_AFTER_S = 60.0


@dataclass
class OpenSink:
    """A sink at work. The offsets are those of records of the topic `metrics`."""

    settings: SinkSetting
    sink: Sink
    given: int  # the last record that it was given
    settled: int  # the last record that it was given when notes were last made

    @property
    def key(self) -> str:
        return self.settings.model_dump_json()


@contextlib.contextmanager
def running(context: SinkContext) -> Iterator[Sinks]:
    """Open the sinks of the run file for as long as the block lasts.

    Raises ConfigError for a sink that cannot be opened.
    """
    path = context.run.directory / NOTES
    notes = read_notes(path)
    opened_sinks: list[OpenSink] = []
    for settings in context.run.orchestrator.sinks:
        last = notes.get(settings.model_dump_json(), -1)
        opened_sinks.append(OpenSink(settings, opened(context, settings), given=last, settled=last))
    sinks = Sinks(opened_sinks, topology.learner_identity(context.run.learner.name), path)
    try:
        yield sinks
    finally:
        sinks.close()


def read_notes(path: Path) -> dict[str, int]:
    """The last offset that each sink has written, by the settings of the sink."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError):  # without notes, everything is written again
        return {}


def check(settings: Iterable[SinkSetting]) -> None:
    """Raise ConfigError if a sink cannot be imported. Called before anything is started."""
    for sink in settings:
        _make(sink.kind)


def opened(context: SinkContext, sink: SinkSetting) -> Sink:
    """Open one sink. Raises ConfigError for any failure, so that a run does not start and then
    loses its metrics.
    """
    try:
        return _make(sink.kind)(context, **sink.params)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"orchestrator.sinks: {sink.kind} cannot be opened: {describe_error(error)}; change its"
            " params, or leave it out"
        ) from None


def _make(kind: str) -> SinkFactory:
    if kind not in SINKS:
        added = plugins("streamrl.sinks")
        path = added[kind].path if kind in added else kind
        return import_path(path, "orchestrator.sinks", (*SINKS, *added))
    module, _, name = SINKS[kind].partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        needs = f"the package {NEEDS.get(kind, kind)} ({error}): pip install 'streamrl[{kind}]'"
        raise ConfigError(f"orchestrator.sinks: {kind} needs {needs}, or leave it out") from None


class Sinks:
    """Hands metric records to all sinks, in the order of the topic.

    A sink that fails is logged and gets no more records, and the run continues.
    """

    def __init__(self, sinks: Sequence[OpenSink], lead: str, notes: Path) -> None:
        self._sinks = list(sinks)
        self._curves = Curves(lead)
        self._notes = notes
        self._noted_s = time.monotonic()
        self._queue: queue.SimpleQueue[list[MetricRecord] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
        self._thread.start()

    @property
    def unwritten(self) -> int | None:
        """The first offset of `metrics` that some sink has not written; None: there are no sinks.
        Asked before the first `write`.
        """
        return min((sink.given + 1 for sink in self._sinks), default=None)

    def write(self, records: Iterable[tuple[int, Metric]]) -> None:
        """Queue records for all sinks. They are pairs of an offset and the record at that offset,
        in order, from `unwritten` on or from before it.
        """
        entries: list[MetricRecord] = []
        for offset, metric in records:
            entries.append(self._curves.entry(offset, metric))
        if entries:
            self._queue.put(entries)

    def close(self) -> None:
        """Let the sinks write what they were given, for LEAVE_S at most, and close them."""
        self._queue.put(None)
        self._thread.join(LEAVE_S)
        if self._thread.is_alive():
            logger.warning(
                "sinks have not taken everything within %.0f s; they are given it again when the"
                " run is next started",
                LEAVE_S,
            )

    def _work(self) -> None:
        while (entries := self._queue.get()) is not None:
            for sink in list(self._sinks):
                if not self._write(sink, entries):
                    self._sinks.remove(sink)
            if time.monotonic() - self._noted_s >= NOTE_AFTER_S:
                self._note()
        for sink in list(self._sinks):
            if self._call(sink, sink.sink.close):
                sink.settled = sink.given
            else:
                self._sinks.remove(sink)
        self._note()

    def _write(self, sink: OpenSink, entries: Sequence[MetricRecord]) -> bool:
        """Give a sink the entries that it lacks. Returns whether the sink still works."""
        new = [entry for entry in entries if entry.offset > sink.given]
        if not new:
            return True
        sink.given = new[-1].offset
        return self._call(sink, lambda: sink.sink.write(new))

    def _call(self, sink: OpenSink, function: Callable[[], None]) -> bool:
        """Call a function of a sink. Returns whether the sink still works."""
        try:
            function()
        except Exception as error:
            again = "it is given what it lacks when the run is next started"
            logger.error(
                "sink %s is left out from now on: %s; %s",
                sink.settings.kind,
                describe_error(error),
                again,
            )
            return False
        return True

    def _note(self) -> None:
        """Note the offsets that have settled. The note of a sink that failed stays as it is."""
        notes = read_notes(self._notes)
        for sink in self._sinks:
            notes[sink.key] = sink.settled
            sink.settled = sink.given
        try:
            write_atomically(self._notes, msgspec.json.encode(notes).decode())
        except OSError as error:  # the next session writes more again
            logger.warning("%s cannot be written: %s", self._notes, describe_error(error))
        self._noted_s = time.monotonic()
