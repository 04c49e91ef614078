"""Asks every part of a run at `/livez` whether it is alive, at `/progressz` whether it has done
work, and the broker whether it answers, in threads next to the loop.

`plan.py` decides what follows from the answers. Each part writes its address to a file next to the
runs (`run/monitoring/targets.py`). A part that has not written it yet is still starting and is not
judged.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.pages import liveness_limit_s
from streamrl.run.monitoring.targets import targets_file
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import StreamrlError
from streamrl.system.text import one_line

PERIOD_S = 5.0  # between two questions to the same part
ANSWER_S = 2.0  # for an answer


@dataclass
class ProbeState:
    """What the probe knows of a part since it was last started."""

    silent_s: float = 0.0  # the time for which it has been asked and has not answered
    hangs: str = ""  # the reason to end it; empty while it lives
    has_progressed: bool = False  # whether it has answered that it has done work


class Liveness:
    """Asks for as long as the context lasts. `names` maps a process to the name of its part."""

    def __init__(self, run: RunFile, names: Mapping[str, str]) -> None:
        self._run = run
        self._names = dict(names)
        self.lives = {name: ProbeState() for name in names}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_all, name="liveness", daemon=True)

    def __enter__(self) -> Liveness:
        if self._run.metrics.serve:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def on_start(self, name: str) -> None:
        """Forget the address and the answers of the part's last process: it is started again."""
        if name in self.lives:
            targets_file(self._run, self._names[name]).unlink(missing_ok=True)
            self.lives[name] = ProbeState()

    def hanging(self) -> dict[str, str]:
        """The processes that hang, each with the reason to end it."""
        return {name: life.hangs for name, life in self.lives.items() if life.hangs}

    def progressed(self) -> list[str]:
        """The processes that have done work since they were started."""
        return [name for name, life in self.lives.items() if life.has_progressed]

    def _ask_all(self) -> None:
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            asked_s = time.monotonic()
            while not self._over.wait(PERIOD_S):
                now_s = time.monotonic()
                # this process may have been suspended itself
                since_s = min(now_s - asked_s, 2 * PERIOD_S)
                asked_s = now_s
                for name, part in self._names.items():
                    life = self.lives[name]
                    if address := listening(targets_file(self._run, part)):
                        ask(client, address, life, since_s, liveness_limit_s(part))


def listening(note: Path) -> str:
    """The part's address as HOST:PORT, empty until the part has written it."""
    try:
        return str(json.loads(note.read_text())[0]["targets"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def ask(
    client: httpx.Client, address: str, life: ProbeState, since_s: float, limit_s: float
) -> None:
    """Ask one part, `since_s` after the last question.

    A part hangs if it answers that its loop makes no progress, or if it does not answer for
    `limit_s`.
    """
    try:
        answer = client.get(f"http://{address}/livez")
    except (httpx.HTTPError, httpx.InvalidURL):
        life.silent_s += since_s
        if life.silent_s > limit_s:
            life.hangs = (
                f"it has not answered at http://{address}/livez for {life.silent_s:.0f} s, the"
                f" limit is {limit_s:.0f} s"
            )
        return
    life.silent_s = 0.0
    life.hangs = "" if answer.is_success else one_line(answer.text)
    if not life.has_progressed:
        with contextlib.suppress(httpx.HTTPError):
            life.has_progressed = client.get(f"http://{address}/progressz").is_success


class BrokerWatch:
    """Asks the broker of a run for as long as the context lasts. `answers`: whether it did the last
    time.
    """

    def __init__(self, log: Log) -> None:
        self.answers = False
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="broker watch", daemon=True)

    def __enter__(self) -> BrokerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                self._log.topics()
                self.answers = True
            except StreamrlError:
                self.answers = False
            self._over.wait(PERIOD_S)
