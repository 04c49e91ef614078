"""Orchestrator: keeps the parts of a run running, watches its topics, reports its progress, and
ends it when its target is reached. `whole_run.py` has what `streamrl up` does before and after.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.display import Display
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.run_view import RunView, deciding_view
from streamrl.run.monitoring.sinks import runner
from streamrl.run.monitoring.sinks.base import SinkContext
from streamrl.run.monitoring.start_offsets import SCHEMAS, start_offsets
from streamrl.run.monitoring.verdict import Verdict
from streamrl.run.orchestrator import run_directory
from streamrl.run.orchestrator.conclusion import conclude
from streamrl.run.orchestrator.gauges import gauges
from streamrl.run.orchestrator.parts import SupervisedParts, parts_by_metrics
from streamrl.run.orchestrator.plan import INTERRUPTED
from streamrl.run.orchestrator.preparation import publish_config
from streamrl.run.orchestrator.run_watch import RunWatch
from streamrl.run.orchestrator.terminal import logging_to, open_display
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Offsets, Reader
from streamrl.stream.processor.part import open_part
from streamrl.system.errors import StreamrlError

POLL_S = 0.2
MAX_POLL_RECORDS = 2_000


def main(run: RunFile, log: Log, stop: threading.Event) -> int:
    """Watch a run whose parts others start: report its progress, and end with the report when its
    target is reached. Returns the exit code.
    """
    with logging_to(run.directory / "logs" / "orchestrator.log"), open_display() as display:
        run_directory.write_run_file(run)
        publish_config(run, log)
        verdict = watch(run, log, stop, display)
        conclude(run, log, display, verdict)
        return verdict.exit_code


def watch(
    run: RunFile,
    log: Log,
    stop: threading.Event,
    display: Display,
    parts: SupervisedParts | None = None,
) -> Verdict:
    """Follow the run's topics, keep its parts running and show it until it is over or stopped."""
    began_s = time.time()
    began = time.monotonic()
    view = deciding_view(run, began_s)
    lines_said = queue.SimpleQueue[str]()
    with (
        open_part(log, topology.ORCHESTRATOR.name, writer=None) as part,
        runner.running(SinkContext(run, lines_said.put, began_s)) as sinks,
        opened_reader(run, log, view, sinks.unwritten) as (reader, history),
    ):
        run_watch = RunWatch(run, view, history)
        try:
            while not stop.is_set():
                messages = reader.poll(MAX_POLL_RECORDS, POLL_S)
                events = [to_event(message, SCHEMAS[message.topic]) for message in messages]
                # A clock that is set while the run is watched decides nothing.
                now = began_s + time.monotonic() - began
                run_watch.on_events(events, now)
                sinks.write(run_watch.metrics(events))
                failure = parts.keep_running(display) if parts else None
                lines = parts.lines() if parts else parts_by_metrics(view, now)
                if verdict := failure or run_watch.verdict(now):
                    return verdict
                run_watch.on_position(reader.position)
                if run_watch.measure_due(now):
                    part.mark_ready()
                    part.meter.publish(gauges(view, lines, now))
                while not lines_said.empty():
                    display.say(lines_said.get())
                if run_watch.show_due(now):
                    display.show(Frame(run, view, now, lines))
            return Verdict(INTERRUPTED, "interrupted")
        finally:
            with contextlib.suppress(StreamrlError):  # the last measurements are not worth an error
                part.meter.publish(gauges(view, [], time.time()))


@contextlib.contextmanager
def opened_reader(
    run: RunFile, log: Log, view: RunView, unwritten: int | None
) -> Iterator[tuple[Reader, Offsets]]:
    """A reader of what the view lacks of the run, and the offsets at which history ends."""
    start = start_offsets(log, view, run.orchestrator.target, unwritten)
    with contextlib.closing(log.reader(start)) as reader:
        yield reader, log.end_offsets(start)
