"""Orchestrator: starts the parts of a run, watches its topics, says how it goes, and ends it when
its target is reached.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from streamrl.config import topology
from streamrl.config.run_file import RunFile, Target
from streamrl.config.topology import Part
from streamrl.errors import StreamrlError
from streamrl.local_kafka import broker, connect, distribution
from streamrl.log import topics
from streamrl.log.codec import to_event, to_message
from streamrl.log.kafka import KafkaLog
from streamrl.log.protocol import Log, Output, beginning_offset, end_offset, partitions_of, read
from streamrl.monitoring import report
from streamrl.monitoring.display import Display, Frame, PartLine, make_display
from streamrl.monitoring.http import ANYWHERE, Asked, forget, serving
from streamrl.monitoring.run_view import (
    BATCHES,
    SILENT_S,
    TOPICS,
    Verdict,
    View,
    active_s,
    believable,
    deciding_view,
    fold,
    judge,
)
from streamrl.monitoring.sinks import runner
from streamrl.monitoring.sinks.base import Place
from streamrl.orchestrator import run_directory
from streamrl.orchestrator.liveness import Liveness
from streamrl.orchestrator.plan import BROKER, BROKER_PART, GiveUp, Kill, Start, decide, how
from streamrl.orchestrator.supervisor import Supervisor
from streamrl.processor.part import open_part
from streamrl.records import FateKind, RunConfig

logger = logging.getLogger(__name__)


SCHEMAS = {**TOPICS, **BATCHES}
POLL_S = 0.2
SHOW_EVERY_S = 0.5
MEASURE_EVERY_S = 1.0
NEWS_S = 30.0  # what a part said longer ago says nothing of now
BROKER_LIMIT_S = 600.0  # the first start downloads it
INTERRUPTED = 130
FATES: tuple[str, ...] = get_args(FateKind)


def up(
    run: RunFile,
    stop: threading.Event,
    resume: bool = False,
    fresh: bool = False,
    at: Asked = ANYWHERE,
) -> int:
    """A whole run: broker, topics, every part, until its end or `stop`. Returns the exit code;
    nothing of it is left running.

    `at`: where the orchestrator itself shows its metrics; the parts take ports that are free.
    """
    runner.check(run.orchestrator.sinks)
    with (
        run_directory.take(run, resume, fresh) as home,
        _log_file(home / "logs" / "orchestrator.log"),
        _display() as display,
    ):
        supervisor = Supervisor(home / "logs", _environment())
        forget(run)
        try:
            if not _with_broker(run, supervisor, display, stop):
                return INTERRUPTED
            kafka = KafkaLog(connect.client_settings(run), run.run)
            _prepare_topics(run, kafka, resume, display)
            with (
                serving(run, kafka, "orchestrator", at) as log,
                Liveness(run, topology.identities(run)) as liveness,
            ):
                verdict = watch(run, log, stop, display, Parts(run, supervisor, liveness))
            supervisor.stop_all(but=(BROKER,))
            _conclude(run, kafka, display, verdict)
            return verdict.exit_code
        finally:
            supervisor.close()
            forget(run)


def main(run: RunFile, log: Log, stop: threading.Event) -> int:
    """Watch a run whose parts others start: say how it goes, and end with the report when its
    target is reached. Returns the exit code.
    """
    with _log_file(run.directory / "logs" / "orchestrator.log"), _display() as display:
        run_directory.write_run_file(run)
        _publish_config(run, log)
        verdict = watch(run, log, stop, display)
        _conclude(run, log, display, verdict)
        return verdict.exit_code


# ---- the loop ------------------------------------------------------------------------------------


class Parts:
    """The run's parts under a supervisor: kept running, and described."""

    def __init__(self, run: RunFile, supervisor: Supervisor, liveness: Liveness) -> None:
        self._run, self._supervisor, self._liveness = run, supervisor, liveness
        self._planned = {part.name: part for part in topology.parts(run)}

    def keep(self, display: Display) -> Verdict | None:
        """Start what is to be started, and end what hangs. A part that cannot be kept running is
        the end of the run.
        """
        observed = self._supervisor.observe(self._liveness.hanging())
        for action in decide(
            self._run.orchestrator, [*self._broker(), *self._planned], observed, time.monotonic()
        ):
            match action:
                case Kill(name, reason):
                    display.say(f"{name} is ended, and started again: {reason}")
                    self._supervisor.kill(name, reason)
                case Start(name):
                    if ends := observed[name].ends if name in observed else ():
                        display.say(
                            f"{name} ended with {how(ends[-1].exit_code)}, starting it again ({len(ends)}): {self.note(name)}"
                        )
                    self._liveness.begins(name)
                    self._supervisor.start(
                        name,
                        command(self._run, self._planned.get(name) or BROKER_PART),
                    )
                case GiveUp(name, reason):
                    return Verdict(
                        1,
                        f"{name} is given up: {reason}. It said: {self.note(name)} (log: {_shown(self._supervisor.log_path(name))})",
                    )
        return None

    def lines(self) -> list[PartLine]:
        observed, time_s = self._supervisor.observe(), time.monotonic()
        return [
            PartLine(
                name,
                "running" if part.running else "back-off",
                time_s
                - (self._supervisor.started_s(name) if part.running else part.ends[-1].time_s),
                len(part.ends) - (not part.running),
                self.note(name, NEWS_S if part.running else math.inf),
            )
            for name, part in observed.items()
        ]

    def note(self, name: str, within_s: float = math.inf) -> str:
        return without_prefix(self._supervisor.last_line(name, within_s))

    def _broker(self) -> list[str]:
        return [BROKER] if self._supervisor.has(BROKER) else []


def watch(
    run: RunFile, log: Log, stop: threading.Event, display: Display, parts: Parts | None = None
) -> Verdict:
    """Follow the run's topics, keep its parts running, show it, until it is over or `stop` is set."""
    began_s, began = time.time(), time.monotonic()
    seen = deciding_view(run, began_s)
    begins = log.beginning_offsets(partitions_of(log, TOPICS))
    if target := run.orchestrator.target:
        begins[topology.sole_partition(topology.BATCHES)] = batches_begin(log, target)
    history = log.end_offsets(begins)
    measured_s = 0.0
    shown_s = 0.0
    lines_said = queue.SimpleQueue[str]()
    with (
        open_part(log, "orchestrator", writer=None) as part,
        contextlib.closing(log.reader(begins)) as reader,
        runner.running(Place(run, lines_said.put, seen.since_s)) as sinks,
    ):
        try:
            while not stop.is_set():
                messages = reader.poll(2_000, POLL_S)
                events = [to_event(message, SCHEMAS[message.topic]) for message in messages]
                # a clock that is set while the run is watched decides nothing
                now = began_s + time.monotonic() - began
                seen = fold(seen, events, None if history else now)
                sinks.take(
                    (event.offset, metric)
                    for event in events
                    if (metric := believable(event, seen.version))
                )
                verdict = parts.keep(display) if parts else None
                lines = parts.lines() if parts else heard(seen, now)
                if verdict := verdict or judge(run.orchestrator, seen, now):
                    return verdict
                history = {
                    where: end for where, end in history.items() if reader.position(*where) < end
                }
                # or counts of what has been would look like what is going on
                if not history and now - measured_s >= MEASURE_EVERY_S:
                    part.mark_ready()
                    measured_s = now
                    part.meter.publish(gauges(seen, lines, now))
                while not lines_said.empty():
                    display.say(lines_said.get())
                if now - shown_s >= SHOW_EVERY_S:
                    shown_s = now
                    display.show(Frame(run, seen, now, lines))
            return Verdict(INTERRUPTED, "interrupted")
        finally:
            with contextlib.suppress(StreamrlError):  # the last measurements are not worth an error
                part.meter.publish(gauges(seen, [], time.time()))


def batches_begin(log: Log, target: Target) -> int:
    """The offset in `batches` from which a run that goes on reads them: there are as many of the
    target's env as it takes, or all that the log has.

    A batch may be large, so no more of them are read than a verdict needs.
    """
    batches = topology.sole_partition(topology.BATCHES)
    start, end = beginning_offset(log, *batches), end_offset(log, *batches)
    distance = 4 * target.batches
    while True:
        begin = max(start, end - distance)
        seen = View("", counts_batches=True)
        fold(
            seen,
            (
                to_event(message, BATCHES[topology.BATCHES])
                for message in read(log, *batches, begin, end)
            ),
        )
        if begin == start or len(seen.rewards.get(target.env, {})) >= target.batches:
            return begin
        distance *= 4


def gauges(seen: View, parts: Sequence[PartLine], time_s: float) -> dict[str, float]:
    """What the orchestrator measures: how parts and servers are, how far the run is, what became of
    rollouts, how long there has been a server.
    """
    values = {f"orchestrator/restarts/{part.name}": float(part.restarts) for part in parts}
    values |= {
        f"orchestrator/running/{part.name}": float(part.state == "running") for part in parts
    }
    values |= {
        f"orchestrator/fates/{env}/{fate}": float(seen.fates[env][fate])
        for env in {**seen.demand, **seen.fates}
        for fate in FATES
    }
    for name, server in seen.servers.items():
        values[f"orchestrator/server_ready/{name}"] = float(server.state == "ready")
        values[f"orchestrator/server_behind/{name}"] = float(max(0, seen.version - server.version))
        values[f"orchestrator/server_silent_s/{name}"] = max(0.0, time_s - server.heartbeat_s)
    if seen.version >= 0:
        # what lies between two sessions was not waiting
        announced_s = max(seen.version_s, seen.since_s)
        values |= {
            "orchestrator/version": float(seen.version),
            "orchestrator/since_version_s": time_s - announced_s,
        }
    if seen.batch >= 0:
        values["orchestrator/batch"] = float(seen.batch)
    if seen.ready_s is not None:
        values["orchestrator/active_s"] = active_s(seen, time_s)
    return values


def heard(seen: View, time_s: float) -> list[PartLine]:
    """Parts that others started, by the metrics they publish."""
    ages = {
        name: time_s - heard_s
        for name, heard_s in sorted(seen.heard_s.items())
        if name != "orchestrator" and heard_s >= seen.since_s
    }
    return [
        PartLine(name, "running" if age < SILENT_S else "silent", age) for name, age in ages.items()
    ]


# ---- before and after ----------------------------------------------------------------------------


def command(run: RunFile, part: Part) -> list[str]:
    """The command line of a part."""
    return [
        sys.executable,
        "-m",
        "streamrl.cli",
        "--debug",
        part.role,
        str(run.directory / run_directory.RUN_FILE),
        *part.options,
    ]


def _with_broker(
    run: RunFile, supervisor: Supervisor, display: Display, stop: threading.Event
) -> bool:
    """See to it that the run has a broker: a cluster that is named, one that is running, or one of
    our own. False when `stop` came first.
    """
    home, started = connect.broker_dir(run), time.monotonic()
    if connect.cluster_settings(run).get("bootstrap.servers") or broker.running_address(home):
        return True
    supervisor.start(BROKER, command(run, BROKER_PART))
    said_s = 0.0
    while not stop.wait(POLL_S):
        waited_s = time.monotonic() - started
        if not supervisor.observe()[BROKER].running:
            said = without_prefix(supervisor.last_line(BROKER))
            raise StreamrlError(
                f"the broker did not start: {said} (log: {_shown(supervisor.log_path(BROKER))})"
            )
        if broker.running_address(home):
            display.say(
                f"broker: Kafka {distribution.VERSION} at {broker.running_address(home)} after {waited_s:.1f} s"
            )
            return True
        if waited_s > BROKER_LIMIT_S:
            raise StreamrlError(
                f"the broker is not up after {waited_s:.0f} s; see {_shown(supervisor.log_path(BROKER))}"
            )
        if waited_s - said_s >= 5:
            said_s = waited_s
            display.say(
                f"waiting {waited_s:.0f} s for the broker: {without_prefix(supervisor.last_line(BROKER)) or 'starting'}"
            )
    return False


def _prepare_topics(run: RunFile, log: Log, resume: bool, display: Display) -> None:
    """Topics as planned; and no run begins on what another left."""
    if not resume and any(
        end_offset(log, *topology.sole_partition(topic)) > 0
        for topic in (topology.CONFIG, topology.POLICY_VERSIONS)
        if topic in log.topics()
    ):
        ways = "go on with it (--resume), take another name (--set run=NAME), or delete it (`streamrl topics delete RUN.yaml`)"
        raise StreamrlError(f"the cluster already holds data of a run {run.run!r}: {ways}")
    changes = topics.apply(run, connect.client_settings(run))
    if changes:
        display.say(f"topics: {len(changes)} changes")
    _publish_config(run, log)


def _publish_config(run: RunFile, log: Log) -> None:
    """The resolved run file; secrets are not in it, only where to find them."""
    writer = log.producer()
    writer.send(
        to_message(
            Output(
                topology.CONFIG,
                run.run,
                RunConfig(run=run.run, text=run.to_json(), time_s=time.time()),
            )
        )
    )
    writer.flush()
    writer.close()


def _conclude(run: RunFile, log: Log, display: Display, verdict: Verdict) -> None:
    """Say how it ended, and write the report; a run that was interrupted has one too."""
    display.close()
    say(verdict.reason)
    try:
        written = report.write(run, log)
    except StreamrlError as error:  # the reason above is what counts
        say(f"no report: {error}")
        return
    say(report.in_words(written))
    say(
        f"report: {_shown(run.directory / 'report.json')}, curve: {_shown(run.directory / 'reward.png')}"
    )


def say(line: str) -> None:
    """A line on stdout, if anybody is left to read it."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


@contextlib.contextmanager
def _display() -> Iterator[Display]:
    display = make_display()
    try:
        yield display
    finally:
        with contextlib.suppress(OSError):
            display.close()


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """What this process logs goes to a file: on the screen it would tear the display apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    root, handler = logging.getLogger(), logging.FileHandler(path)
    before = root.handlers
    handler.setFormatter(before[0].formatter if before else None)
    root.handlers = list[logging.Handler]([handler])
    try:
        yield
    finally:
        root.handlers = before
        handler.close()


def _environment() -> dict[str, str]:
    """Of the parts. A port that was given for metrics is the orchestrator's: they are several on
    this machine.
    """
    return {**os.environ, "PYTHONUNBUFFERED": "1", "STREAMRL_METRICS_PORT": "0"}


def without_prefix(line: str) -> str:
    """A line of a part's log without time, level and module."""
    return re.sub(r"^[\d-]+ [\d:,.]+ [A-Z]+ +\S+: ", "", line).removeprefix("streamrl: ")


def _shown(path: Path) -> str:
    """Relative to here where it lies below."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
