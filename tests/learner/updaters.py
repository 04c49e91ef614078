"""Updaters that one test hands to the next. Tracing the programs of a learner takes seconds, and
the lives, replays and forks of these tests trace the same few again and again.

An Updater keeps nothing of the policy that it trains, so a life cannot tell one that was used
before from a new one. The fixtures that all of a file's tests are compared with have new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from streamrl.config.sections.learner import Learner
from streamrl.learner.update import Updater

_unused = dict[tuple[str, int, int], list["SharedUpdater"]]()
_lock = threading.Lock()  # learners and scorers are threads here


class SharedUpdater(Updater):
    """Goes back to the others at the end of its life."""

    def __init__(self, config: Learner, rows: int, max_seq_len: int) -> None:
        super().__init__(config, rows, max_seq_len)
        self._key = key(config, rows, max_seq_len)

    @contextmanager
    def training(self) -> Generator[None]:
        try:
            with super().training():
                yield
        finally:
            self._give_back()

    @contextmanager
    def use_mesh(self) -> Generator[None]:
        try:
            with super().use_mesh():
                yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._tracker.values.clear()
        with _lock:
            _unused.setdefault(self._key, []).append(self)


def key(config: Learner, rows: int, max_seq_len: int) -> tuple[str, int, int]:
    return config.model_dump_json(), rows, max_seq_len


def shared_updater(config: Learner, rows: int, max_seq_len: int) -> Updater:
    """One that nobody uses, or a new one."""
    with _lock:
        if unused := _unused.get(key(config, rows, max_seq_len)):
            return unused.pop()
    return SharedUpdater(config, rows, max_seq_len)
