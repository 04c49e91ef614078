"""Orchestrator: keeps the parts of a run running, watches its topics, reports its progress, and
ends it when its target is reached. `whole_run.py` has what `streamrl up` does before and after.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.display import Display
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.run_view import BATCHES, TOPICS
from streamrl.run.monitoring.sinks import runner
from streamrl.run.monitoring.sinks.base import SinkContext
from streamrl.run.monitoring.verdict import Verdict
from streamrl.run.orchestrator import run_directory
from streamrl.run.orchestrator.conclusion import conclude
from streamrl.run.orchestrator.gauges import gauges
from streamrl.run.orchestrator.parts import SupervisedParts, parts_by_metrics
from streamrl.run.orchestrator.preparation import publish_config
from streamrl.run.orchestrator.run_watch import RunWatch
from streamrl.run.orchestrator.start_offsets import start_offsets
from streamrl.run.orchestrator.terminal import logging_to, open_display
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.part import open_part
from streamrl.system.errors import StreamrlError

SCHEMAS = {**TOPICS, **BATCHES}
POLL_S = 0.2
MAX_POLL_RECORDS = 2_000
INTERRUPTED = 130


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
    start = start_offsets(log, run.orchestrator.target)
    run_watch = RunWatch(run, began_s, log.end_offsets(start))
    lines_said = queue.SimpleQueue[str]()
    with (
        open_part(log, topology.ORCHESTRATOR.name, writer=None) as part,
        contextlib.closing(log.reader(start)) as reader,
        runner.running(SinkContext(run, lines_said.put, run_watch.view.since_s)) as sinks,
    ):
        try:
            while not stop.is_set():
                messages = reader.poll(MAX_POLL_RECORDS, POLL_S)
                events = [to_event(message, SCHEMAS[message.topic]) for message in messages]
                # A clock that is set while the run is watched decides nothing.
                now = began_s + time.monotonic() - began
                run_watch.on_events(events, now)
                sinks.write(run_watch.metrics(events))
                failure = parts.keep_running(display) if parts else None
                lines = parts.lines() if parts else parts_by_metrics(run_watch.view, now)
                if verdict := failure or run_watch.verdict(now):
                    return verdict
                run_watch.on_position(reader.position)
                if run_watch.measure_due(now):
                    part.mark_ready()
                    part.meter.publish(gauges(run_watch.view, lines, now))
                while not lines_said.empty():
                    display.say(lines_said.get())
                if run_watch.show_due(now):
                    display.show(Frame(run, run_watch.view, now, lines))
            return Verdict(INTERRUPTED, "interrupted")
        finally:
            with contextlib.suppress(StreamrlError):  # the last measurements are not worth an error
                part.meter.publish(gauges(run_watch.view, [], time.time()))
