"""The processes of a run: starts them, notices their end, takes them down. What to start is decided
in `plan.py`.

Each part is a session of its own, so that Ctrl-C reaches only the orchestrator, which stops the
parts in order. None of them outlives it, however it ends (`tether.py`), nor does anything that they
have started (`guardian.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.orchestrator import orphan_reaper, pdeathsig
from streamrl.orchestrator.plan import End, Observed, how, stop_order

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 15.0  # between asking a part to end and ending it
TAIL_BYTES = 8_192


@dataclass
class Child:
    """One part: its process while it runs, and how its earlier lives ended."""

    process: subprocess.Popen[bytes]
    started_s: float
    ends: list[End] = field(default_factory=list[End])
    ended: bool = False


class Supervisor:
    """Starts and stops processes by name; to be used from the main thread. The output of each is
    appended to `<logs>/<name>.log`.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.logs = logs
        self._mark = uuid.uuid4().hex
        given = os.environ if environment is None else environment
        # sets of strings keep their order over restarts
        self._environment = {"PYTHONHASHSEED": "0", **given, orphan_reaper.MARK: self._mark}
        self._children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)
        # It holds the read end of a pipe whose only write end is here. Nothing is ever written.
        self._guardian = subprocess.Popen(
            [sys.executable, orphan_reaper.__file__, self._mark],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, name: str, command: Sequence[str]) -> None:
        tied = [sys.executable, "-S", "-E", pdeathsig.__file__, str(os.getpid()), *command]
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(
                tied,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        earlier = self._children.get(name)
        self._children[name] = Child(process, time.monotonic(), earlier.ends if earlier else [])
        logger.info("started %s, process %d", name, process.pid)

    def observe(self, hanging: Mapping[str, str] | None = None) -> dict[str, Observed]:
        """Every part that was ever started, as it stands; ends are noticed here. `hanging`: parts
        that do nothing any more -> why one thinks so.
        """
        for name, child in self._children.items():
            self._reap(name, child)
        reasons = hanging or {}
        return {
            name: Observed(not child.ended, tuple(child.ends), reasons.get(name, ""))
            for name, child in self._children.items()
        }

    def kill(self, name: str, reason: str) -> None:
        """SIGKILL to a part and its group: one that hangs does not listen to SIGTERM. `observe`
        notices the end.
        """
        logger.warning("%s, process %d, is killed: %s", name, self.pid(name), reason)
        self._children[name].process.kill()
        _kill_group(self.pid(name))

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    def started_s(self, name: str) -> float:
        """By `time.monotonic`, as the times of `End`."""
        return self._children[name].started_s

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def last_line(self, name: str, within_s: float = math.inf) -> str:
        """What it said last, if that is not longer ago than `within_s`."""
        path = self.log_path(name)
        return last_line(path) if time.time() - path.stat().st_mtime <= within_s else ""

    def has(self, name: str) -> bool:
        """Was it ever started, and not stopped since?"""
        return name in self._children

    def stop_all(self, but: Container[str] = (), limit_s: float = STOP_LIMIT_S) -> None:
        """Take everything down, in the order of `plan.stop_order`."""
        for wave in stop_order(name for name in self._children if name not in but):
            self.stop(wave, limit_s)

    def close(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Take everything down, and what is left of it."""
        self.stop_all(limit_s=limit_s)
        self._guardian.communicate()

    def stop(self, names: Iterable[str], limit_s: float = STOP_LIMIT_S) -> None:
        """SIGTERM to all of them; what has not ended after `limit_s` is killed. They are not
        observed as ended by themselves.
        """
        children = {name: self._children[name] for name in names}
        for child in children.values():
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + limit_s
        for name, child in children.items():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s has not ended %.0f s after SIGTERM: killed", name, limit_s)
                child.process.kill()
                child.process.wait()
            _kill_group(child.process.pid)
            del self._children[name]

    def _reap(self, name: str, child: Child) -> None:
        code = child.process.poll()
        if code is None or child.ended:
            return
        _kill_group(child.process.pid)
        now, child.ended = time.monotonic(), True
        child.ends.append(End(now, now - child.started_s, code))
        logger.warning("%s ended with %s: %s", name, how(code), self.last_line(name))


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _kill_group(leader: int) -> None:
    """End what a part has left in its session's group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
