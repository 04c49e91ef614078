"""Starts the processes of a run, notices their exits and stops them. `plan.py` decides what to do.

Each part is a separate session, so that Ctrl-C reaches only the orchestrator, which stops the
parts in order. No part outlives the orchestrator, however that ends, and neither does what the
parts have started (`system/process_group.py`).
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import time
import uuid
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from streamrl.run.orchestrator.plan import (
    STOP_LIMIT_S,
    Exit,
    PartState,
    describe_exit,
    stop_limit_s,
    stop_order,
)
from streamrl.system import process_group

logger = logging.getLogger(__name__)

TAIL_BYTES = 8_192


@dataclass
class Child:
    """A part's process and the exits of those before it."""

    process: subprocess.Popen[bytes]
    started_s: float
    ends: list[Exit] = field(default_factory=list[Exit])
    ended: bool = False
    killed: bool = False  # by `Supervisor.kill`
    held_bytes: int = 0  # resident memory when it was last looked at


class Supervisor:
    """Starts and stops processes by name. To be used from the main thread only.

    The output of each process is appended to `<logs>/<name>.log`.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.logs = logs
        self._token = uuid.uuid4().hex
        given = os.environ if environment is None else environment
        # With a fixed hash seed, sets of strings have the same order in every process.
        self._environment = {"PYTHONHASHSEED": "0", **given, process_group.RUN_TOKEN: self._token}
        self._children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)
        self._reaper = subprocess.Popen(
            process_group.reaper(self._token),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """Start a process, with its own environment variables on top of those of all."""
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(
                process_group.with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, **(variables or {})},
                start_new_session=True,
            )
        earlier = self._children.get(name)
        self._children[name] = Child(process, time.monotonic(), earlier.ends if earlier else [])
        logger.info("started %s, process %d", name, process.pid)

    def notice_exits(self, progressed: Container[str] = (), broker_answers: bool = False) -> None:
        """Note which processes have ended. `progressed` has the parts that have done work since
        they were started last; `broker_answers`: whether the run's broker answers.
        """
        for name, child in self._children.items():
            self._record_exit(name, child, name in progressed, broker_answers)

    def observe(self, hanging: Mapping[str, str] | None = None) -> dict[str, PartState]:
        """The state of every part that was started, as of the last `notice_exits`.

        `hanging` maps the parts that hang to the reason to end them.
        """
        reasons = hanging or {}
        return {
            name: PartState(not child.ended, tuple(child.ends), reasons.get(name, ""))
            for name, child in self._children.items()
        }

    def kill(self, name: str, reason: str) -> None:
        """Send SIGKILL to a part and its group, as a part that hangs does not react to SIGTERM.

        The next `notice_exits` notes the exit.
        """
        logger.warning("%s, process %d, is killed: %s", name, self.pid(name), reason)
        self._children[name].killed = True
        self._children[name].process.kill()
        process_group.kill_group(self.pid(name))

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    def started_s(self, name: str) -> float:
        """When the part was started, by the same monotonic clock as the times of `Exit`."""
        return self._children[name].started_s

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def last_line(self, name: str, within_s: float = math.inf) -> str:
        """The last line of the part's log, empty if it is older than `within_s`."""
        path = self.log_path(name)
        return last_line(path) if time.time() - path.stat().st_mtime <= within_s else ""

    def has(self, name: str) -> bool:
        """Whether the part has been started and not been stopped since."""
        return name in self._children

    def stop_all(self, exclude: Container[str] = (), limit_s: float | None = None) -> None:
        """Stop all parts except those in `exclude`, in the order of `plan.stop_order`.

        `limit_s`: as for `stop`.
        """
        for wave in stop_order(name for name in self._children if name not in exclude):
            self.stop(wave, limit_s)

    def close(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Stop all parts, and whatever they have left running."""
        self.stop_all(limit_s=limit_s)
        self._reaper.communicate()

    def stop(self, names: Iterable[str], limit_s: float | None = None) -> None:
        """Send SIGTERM to these parts and kill those that have not ended after `limit_s`, or after
        the limit of each (`plan.stop_limit_s`) if that is None.

        Their exits are not noted.
        """
        children = {name: self._children[name] for name in names}
        for child in children.values():
            if child.process.poll() is None:
                child.process.terminate()
        asked_s = time.monotonic()
        limits = {name: stop_limit_s(name) if limit_s is None else limit_s for name in children}
        for name, child in sorted(children.items(), key=lambda item: limits[item[0]]):
            limit = limits[name]
            if limit > STOP_LIMIT_S and child.process.poll() is None:
                logger.info(
                    "waiting up to %.0f s for %s, which finishes its step and writes a checkpoint",
                    limit,
                    name,
                )
            try:
                child.process.wait(max(0.0, asked_s + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s has not ended %.0f s after SIGTERM: killed", name, limit)
                child.process.kill()
                child.process.wait()
            process_group.kill_group(child.process.pid)
            del self._children[name]

    def _record_exit(
        self, name: str, child: Child, progressed: bool, broker_answered: bool
    ) -> None:
        if child.ended:
            return
        code = child.process.poll()
        if code is None:
            # The memory of a process that is just ending is 0 already.
            child.held_bytes = resident_bytes(child.process.pid) or child.held_bytes
            return
        process_group.kill_group(child.process.pid)
        now = time.monotonic()
        child.ended = True
        end = Exit(
            time_s=now,
            lived_s=now - child.started_s,
            exit_code=code,
            killed=child.killed,
            held_bytes=child.held_bytes,
            progressed=progressed,
            broker_answered=broker_answered,
        )
        child.ends.append(end)
        logger.warning("%s ended with %s: %s", name, describe_exit(end), self.last_line(name))


def resident_bytes(pid: int) -> int:
    """The memory that a process holds, 0 if there is none."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def last_line(path: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
