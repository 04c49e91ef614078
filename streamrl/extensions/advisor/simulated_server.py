"""A server in a simulation. It computes a token of all of its sequences at a time, and requests
wait while it has as many sequences as it takes. The overhead of a request follows its last token: a
request that is made before a version is loaded begins with the version before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from streamrl.extensions.advisor.facts import Engine, Load
from streamrl.extensions.advisor.timeline import Timeline

ROUNDING = 1e-9  # tokens
LEAST_STEP_S = 1e-9


@dataclass
class Answer:
    """A sequence of a request, and the versions of its first and its last token."""

    tokens: int
    oldest: int = -1
    newest: int = -1


@dataclass
class _Request:
    answers: list[Answer]
    left: int
    on_answers: Callable[[list[Answer]], None]


@dataclass
class SimulatedServer:
    timeline: Timeline
    engine: Engine
    slots: int  # sequences that it works on at a time
    load: Callable[[], Load]  # how it loads the next version
    version: int = 0
    asked_s: float = 0.0  # the time with a sequence
    _newest: int = 0  # version that it has heard of
    _is_loading: bool = False
    _is_paused: bool = False
    _waiting: deque[tuple[Answer, _Request]] = field(default_factory=deque[tuple[Answer, _Request]])
    # Sequences by where `_done` will be at their end.
    _running: list[tuple[float, int, Answer, _Request]] = field(
        default_factory=list[tuple[float, int, Answer, _Request]]
    )
    _done: float = 0.0  # tokens of a sequence that runs since the beginning
    _done_at_s: float = 0.0
    _changes: int = 0  # of what runs; an end that was planned before the last one is void
    _begun: int = 0

    def ask(self, tokens: Sequence[int], on_answers: Callable[[list[Answer]], None]) -> None:
        """Sample an answer of each of these lengths. All are given when the last is complete."""

        def on_last(answers: list[Answer]) -> None:
            self.timeline.after(self.engine.overhead_s, partial(on_answers, answers))

        request = _Request([Answer(count) for count in tokens], len(tokens), on_last)
        self._waiting.extend((answer, request) for answer in request.answers)
        self._change()

    def on_version(self, version: int) -> None:
        """A version was announced."""
        self._newest = version
        if not self._is_loading:
            self._begin_load()

    # ---- versions ----------------------------------------------------------------------------

    def _begin_load(self) -> None:
        self._is_loading = True
        load = self.load()
        self.timeline.after(load.delay_s, partial(self._pause, load))

    def _pause(self, load: Load) -> None:
        self._advance()
        self._is_paused = True
        self.timeline.after(load.pause_s, partial(self._resume, self._newest))
        self._change()

    def _resume(self, version: int) -> None:
        self._advance()
        self.version = version
        self._is_paused = False
        self._is_loading = False
        if self._newest > version:
            self._begin_load()
        self._change()

    # ---- sequences ---------------------------------------------------------------------------

    def _advance(self) -> None:
        """Count what was computed since the last change."""
        passed_s = self.timeline.now_s - self._done_at_s
        self._done_at_s = self.timeline.now_s
        if self._running and not self._is_paused:
            self._done += passed_s / self._step_s
            self.asked_s += passed_s

    @property
    def _step_s(self) -> float:
        return max(self.engine.step_s(len(self._running)), LEAST_STEP_S)

    def _change(self) -> None:
        """Begin and end what is due, and plan the next end."""
        self._advance()
        self._changes += 1
        ended = list[_Request]()
        while self._running and self._running[0][0] <= self._done + ROUNDING:
            _, _, answer, request = heappop(self._running)
            answer.newest = self.version
            request.left -= 1
            if not request.left:
                ended.append(request)
        while self._waiting and len(self._running) < self.slots and not self._is_paused:
            answer, request = self._waiting.popleft()
            answer.oldest = self.version
            self._begun += 1
            first = math.ceil(self._done - ROUNDING)  # It begins with the next token of the others.
            heappush(self._running, (first + answer.tokens, self._begun, answer, request))
        if self._running and not self._is_paused:
            left_s = (self._running[0][0] - self._done) * self._step_s
            self.timeline.after(left_s, partial(self._on_planned, self._changes))
        for request in ended:
            request.on_answers(request.answers)

    def _on_planned(self, change: int) -> None:
        if change == self._changes:
            self._change()
