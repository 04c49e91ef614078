"""The parts of a run, kept running and described."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable

from streamrl.config import topology
from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.config.topology import Part
from streamrl.run.monitoring.display import Display
from streamrl.run.monitoring.frame import PartLine
from streamrl.run.monitoring.run_view import SILENT_S, RunView
from streamrl.run.monitoring.verdict import Verdict
from streamrl.run.orchestrator.liveness import BrokerWatch, Liveness
from streamrl.run.orchestrator.placement import VISIBLE, device_variables, visible_devices
from streamrl.run.orchestrator.plan import (
    BROKER,
    BROKER_PART,
    Abort,
    Kill,
    Start,
    decide,
    describe_exit,
)
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.run.orchestrator.terminal import short_path
from streamrl.stream.local_kafka import ports

NEWS_S = 30.0  # what a part logged longer ago tells nothing about its state now


class SupervisedParts:
    """The parts that this orchestrator has started."""

    def __init__(
        self,
        run: RunFile,
        supervisor: Supervisor,
        liveness: Liveness,
        broker_watch: BrokerWatch,
        started: Iterable[Part],
    ) -> None:
        """`started`: the parts that are started here."""
        self._run = run
        self._supervisor = supervisor
        self._liveness = liveness
        self._broker_watch = broker_watch
        self._planned = {part.name: part for part in started}
        self._gang = [part.name for part in self._planned.values() if part.processes > 1]
        self._coordinator = ""  # the gang's, HOST:PORT
        visible = visible_devices(os.environ.get(VISIBLE))
        self._variables = {
            name: device_variables(run, part, visible) for name, part in self._planned.items()
        }
        if supervisor.has(BROKER):
            self._variables[BROKER] = {}
            self._planned = {BROKER: BROKER_PART, **self._planned}

    def keep_running(self, display: Display) -> Verdict | None:
        """Start the parts that are to be started, and end those that hang. A part that cannot be
        kept running is the end of the run.
        """
        self._supervisor.notice_exits(self._liveness.progressed(), self._broker_watch.answers)
        observed = self._supervisor.observe(self._liveness.hanging())
        actions = decide([*self._planned], observed, time.monotonic(), self._gang)
        for action in actions:
            match action:
                case Kill(name, reason):
                    display.say(f"{name} is ended, and started again: {reason}")
                    self._supervisor.kill(name, reason)
                case Start(name):
                    if ends := observed[name].ends if name in observed else ():
                        display.say(
                            f"{name} ended with {describe_exit(ends[-1])}, "
                            f"starting it again ({len(ends)}): {self.last_line(name)}"
                        )
                    self._liveness.on_start(name)
                    part = self._planned[name]
                    options = self._coordinator_options(part)
                    line = [*command(self._run, part), *options]
                    self._supervisor.start(name, line, self._variables[name])
                case Abort(name, reason):
                    log = short_path(self._supervisor.log_path(name))
                    last = self.last_line(name)
                    return Verdict(
                        1, f"{name} is given up: {reason}. Last line: {last} (log: {log})"
                    )
        return None

    def _coordinator_options(self, part: Part) -> list[str]:
        """The options that tell a part of a gang the address of its coordinator. The first part
        gets a new port whenever it is started, as the one before may not be free yet.
        """
        if part.processes == 1:
            return []
        if part.process == 0:
            self._coordinator = f"{ports.HOST}:{ports.free_port()}"
        return ["--coordinator", self._coordinator]

    def lines(self) -> list[PartLine]:
        """A line for each part: its state and since when, its restarts, its last log line."""
        time_s = time.monotonic()
        lines: list[PartLine] = []
        for name, part in self._supervisor.observe().items():
            if part.running:
                state = "running"
                since_s = self._supervisor.started_s(name)
                restarts = len(part.ends)
                within_s = NEWS_S
            else:
                state = "back-off"
                since_s = part.ends[-1].time_s
                restarts = len(part.ends) - 1
                within_s = math.inf
            note = self.last_line(name, within_s)
            lines.append(PartLine(name, state, time_s - since_s, restarts, note))
        return lines

    def last_line(self, name: str, within_s: float = math.inf) -> str:
        return without_prefix(self._supervisor.last_line(name, within_s))


def parts_by_metrics(view: RunView, time_s: float) -> list[PartLine]:
    """A line for each part that others have started, by the metrics that it publishes."""
    lines: list[PartLine] = []
    for name, heard_s in sorted(view.heard_s.items()):
        if name != topology.ORCHESTRATOR.name and heard_s >= view.since_s:
            age_s = time_s - heard_s
            lines.append(PartLine(name, "running" if age_s < SILENT_S else "silent", age_s))
    return lines


def command(run: RunFile, part: Part) -> list[str]:
    """The command line of a part."""
    run_file = str(run.directory / RUN_FILE)
    return [sys.executable, "-m", "streamrl.cli", "--debug", part.role, run_file, *part.options]


def environment() -> dict[str, str]:
    """The environment of the parts. A port that was given for metrics is the orchestrator's own:
    there are several parts on this machine, and each takes a free one.
    """
    return {**os.environ, "PYTHONUNBUFFERED": "1", "STREAMRL_METRICS_PORT": "0"}


def without_prefix(line: str) -> str:
    """A line of a part's log without time, level and module."""
    return re.sub(r"^[\d-]+ [\d:,.]+ [A-Z]+ +\S+: ", "", line).removeprefix("streamrl: ")
