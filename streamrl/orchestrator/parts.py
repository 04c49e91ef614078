"""The parts of a run, kept running and described."""

from __future__ import annotations

import math
import os
import re
import sys
import time

from streamrl.config import topology
from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.config.topology import Part
from streamrl.local_kafka import ports
from streamrl.monitoring.display import Display
from streamrl.monitoring.frame import PartLine
from streamrl.monitoring.run_view import SILENT_S, RunView
from streamrl.monitoring.verdict import Verdict
from streamrl.orchestrator.liveness import Liveness
from streamrl.orchestrator.placement import VISIBLE, placed, visible_devices
from streamrl.orchestrator.plan import (
    BROKER,
    BROKER_PART,
    Abort,
    Kill,
    Start,
    decide,
    describe_exit,
)
from streamrl.orchestrator.supervisor import Supervisor
from streamrl.orchestrator.terminal import short_path

NEWS_S = 30.0  # what a part logged longer ago says nothing of its state now


class SupervisedParts:
    """The parts that this orchestrator has started."""

    def __init__(self, run: RunFile, supervisor: Supervisor, liveness: Liveness) -> None:
        self._run = run
        self._supervisor = supervisor
        self._liveness = liveness
        self._planned = {part.name: part for part in topology.parts(run)}
        self._gang = [part.name for part in self._planned.values() if part.processes > 1]
        self._coordinator = ""  # of the gang, HOST:PORT
        visible = visible_devices(os.environ.get(VISIBLE))
        self._variables = {name: placed(run, part, visible) for name, part in self._planned.items()}
        if supervisor.has(BROKER):
            self._variables[BROKER] = {}
            self._planned = {BROKER: BROKER_PART, **self._planned}

    def keep_running(self, display: Display) -> Verdict | None:
        """Start the parts that are to be started, and end those that hang. A part that cannot be
        kept running is the end of the run.
        """
        observed = self._supervisor.observe(self._liveness.hanging())
        limits = self._run.orchestrator
        actions = decide(limits, [*self._planned], observed, time.monotonic(), self._gang)
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
                    line = [*command(self._run, part), *self._meeting_place(part)]
                    self._supervisor.start(name, line, self._variables[name])
                case Abort(name, reason):
                    log = short_path(self._supervisor.log_path(name))
                    said = self.last_line(name)
                    return Verdict(1, f"{name} is given up: {reason}. It said: {said} (log: {log})")
        return None

    def _meeting_place(self, part: Part) -> list[str]:
        """The arguments that tell a part of a gang where its parts meet. It is another port of this
        machine whenever they are started, as the one of before may not be free yet.
        """
        if part.processes == 1:
            return []
        if part.process == 0:
            self._coordinator = f"{ports.HOST}:{ports.free_port()}"
        return ["--coordinator", self._coordinator]

    def lines(self) -> list[PartLine]:
        """A line for each part: its state and since when, its restarts, what it said last."""
        time_s = time.monotonic()
        lines: list[PartLine] = []
        for name, part in self._supervisor.observe().items():
            if part.running:
                since_s = self._supervisor.started_s(name)
                said = self.last_line(name, NEWS_S)
                lines.append(
                    PartLine(
                        name=name,
                        state="running",
                        for_s=time_s - since_s,
                        restarts=len(part.ends),
                        note=said,
                    )
                )
            else:
                since_s = part.ends[-1].time_s
                said = self.last_line(name)
                restarts = len(part.ends) - 1
                lines.append(
                    PartLine(
                        name=name,
                        state="back-off",
                        for_s=time_s - since_s,
                        restarts=restarts,
                        note=said,
                    )
                )
        return lines

    def last_line(self, name: str, within_s: float = math.inf) -> str:
        return without_prefix(self._supervisor.last_line(name, within_s))


def parts_by_metrics(seen: RunView, time_s: float) -> list[PartLine]:
    """A line for each part that others have started, by the metrics that it publishes."""
    lines: list[PartLine] = []
    for name, heard_s in sorted(seen.heard_s.items()):
        if name != "orchestrator" and heard_s >= seen.since_s:
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
