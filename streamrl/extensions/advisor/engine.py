"""How long a server takes for a request, measured from the requests that it has answered.

A server computes one token of each of its n sequences in `token_s` + `sequence_s` n, and a request
takes `overhead_s` on top of that. To find these three, a simulated server is asked what the real
one was asked, when it was asked, and they are changed until its answers take as long. The sum of
the absolute differences is made small, and not that of their squares: of some requests, others that
ran next to them are not in the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from streamrl.extensions.advisor.facts import Engine, Load, Request
from streamrl.extensions.advisor.simulated_server import Answer, SimulatedServer
from streamrl.extensions.advisor.timeline import Timeline

ROUNDS = 8  # of Levenberg and Marquardt
CHANGE = 0.1  # of a parameter, for its derivative
DAMPING = 0.01  # at first
SMALL = 0.01  # of the mean time of a request: a difference that is as good as none
# The parameters of the first round, as shares of the mean time of a request.
FIRST = np.array([0.1, 0.45, 0.45])


@dataclass
class Answered:
    """What one server has answered, and when it was paused: (begin, end)."""

    requests: list[Request]
    pauses: list[tuple[float, float]]

    def simulated_s(self, engine: Engine, slots: int) -> np.ndarray:
        """(n,) float64: how long these requests would take a server of this speed."""
        timeline = Timeline()
        first_s = min(request.begun for request in self.requests)
        pauses = sorted(pause for pause in self.pauses if pause[0] >= first_s)
        loads = iter([Load(0.0, end - begin) for begin, end in pauses])
        server = SimulatedServer(timeline, engine, slots, lambda: next(loads))
        taken_s = np.zeros(len(self.requests))

        def ask(index: int) -> None:
            begun_s = timeline.now_s

            def on_answers(_: list[Answer]) -> None:
                taken_s[index] = timeline.now_s - begun_s

            server.ask(self.requests[index].tokens, on_answers)

        for version, (begin, _) in enumerate(pauses, 1):
            timeline.after(begin - first_s, partial(server.on_version, version))
        for index, request in enumerate(self.requests):
            timeline.after(request.begun - first_s, partial(ask, index))
        timeline.run(lambda: False)
        return taken_s


def measure_engine(answered: Sequence[Answered], slots: int) -> Engine:
    """The speed of servers that are alike, by what each has answered: at least one request.

    `slots`: sequences that a server works on at a time. Where the requests do not tell two of the
    times from each other, as on servers that are always full, both keep their part of the sum.
    """
    taken_s = np.concatenate([_taken_s(each.requests) for each in answered])
    scale = _scale(answered, slots)

    def missed_s(shares: np.ndarray) -> np.ndarray:
        engine = Engine(*(shares * scale).tolist())
        return np.concatenate([each.simulated_s(engine, slots) for each in answered]) - taken_s

    shares = FIRST
    missed = missed_s(shares)
    damping = DAMPING
    for _ in range(ROUNDS):
        slopes = [(missed_s(shares + change) - missed) / CHANGE for change in CHANGE * np.eye(3)]
        jacobian = np.stack(slopes, axis=1)
        weighted = jacobian / (np.abs(missed) + SMALL * taken_s.mean())[:, None]
        square = weighted.T @ jacobian
        square += np.diag(damping * np.diag(square) + 1e-12)
        better = np.maximum(shares - np.linalg.solve(square, weighted.T @ missed), 0.0)
        missed_then = missed_s(better)
        if np.abs(missed_then).sum() < np.abs(missed).sum():
            shares, missed, damping = better, missed_then, damping / 4
        else:
            damping *= 8
    return Engine(*(shares * scale).tolist())


def _taken_s(requests: Sequence[Request]) -> np.ndarray:
    return np.array([request.ended - request.begun for request in requests])


def _scale(answered: Sequence[Answered], slots: int) -> np.ndarray:
    """The overhead, the time of a token, and that for each sequence which would each explain the
    mean time of a request by itself.
    """
    requests = [request for each in answered for request in each.requests]
    taken_s = _taken_s(requests)
    longest = np.array([max(request.tokens) for request in requests])
    answers_s = taken_s * [sum(request.tokens) for request in requests] / longest
    alive_s = sum(
        max(request.ended for request in each.requests)
        - min(request.begun for request in each.requests)
        for each in answered
    )
    tokens = sum(sum(request.tokens) for request in requests)
    # Where requests wait for others, they take longer than their tokens do.
    token_s = min(taken_s.mean() / longest.mean(), slots * max(alive_s, 1e-9) / tokens)
    sequences = min(max(answers_s.sum() / max(alive_s, 1e-9), 1.0), slots)
    return np.array([token_s * longest.mean(), token_s, token_s / sequences])
