"""Pauses a topic that carries mostly invalid records. The records stay in the log, unread, and the
other topics are read on.

The breaker counts each topic's records in windows of `WINDOW_RECORDS`. If more than `max_frac` of a
window were dead-lettered, the topic is not read for `PAUSE_S`; then the next window decides anew.
This bounds the damage of a broken producer, a producer that has been repaired is read again without
anybody's help, and valid records between invalid ones come through.

The breaker is no part of the state. The journal records which records were taken and when, so a
replay and a restart take the same ones whatever was decided here. After a restart the counts begin
at 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamrl.stream.log.dead_letters import DeadLetter

WINDOW_RECORDS = 1_000
PAUSE_S = 30.0


@dataclass
class TopicHealth:
    """The counts of one topic."""

    taken: int = 0  # records of the current window
    invalid: int = 0  # of them, those that were dead-lettered
    last_cause: str = ""  # of the last dead letter
    invalid_frac: float = 0.0  # of the last complete window
    paused_at_s: float = -math.inf  # when its last pause began


@dataclass
class CircuitBreaker:
    """Decides which topics are paused. It never pauses one if `max_frac` is 1."""

    max_frac: float
    window_records: int = WINDOW_RECORDS
    pause_s: float = PAUSE_S
    topics: dict[str, TopicHealth] = field(default_factory=dict[str, TopicHealth])

    def count(
        self, taken: Iterable[str], letters: Iterable[DeadLetter], time_s: float
    ) -> list[str]:
        """Count a batch: the topics of its records, and the dead letters of these records. Returns
        a warning for each topic whose pause begins now.
        """
        for topic, records in Counter(taken).items():
            self.topics.setdefault(topic, TopicHealth()).taken += records
        for letter in letters:
            health = self.topics.setdefault(letter.topic, TopicHealth())
            health.invalid += 1
            health.last_cause = letter.cause
        warnings: list[str] = []
        for topic, health in self.topics.items():
            if health.taken >= self.window_records:
                warnings += self.end_window(topic, health, time_s)
        return warnings

    def end_window(self, topic: str, health: TopicHealth, time_s: float) -> list[str]:
        """Begin the topic's next window, and a pause if too much of this one was invalid. Returns
        the warning about it, if any.
        """
        taken = health.taken
        invalid = health.invalid
        health.taken = 0
        health.invalid = 0
        health.invalid_frac = invalid / taken
        if health.invalid_frac <= self.max_frac:
            return []
        health.paused_at_s = time_s
        return [
            f"{topic} sends invalid records and is not read for {self.pause_s:.0f} s: "
            f"{invalid:,} of its last {taken:,} records could not be used, "
            f"more than {self.max_frac:.0%}, the last because: {health.last_cause}; "
            "see `streamrl dead-letters list RUN`"
        ]

    def paused_topics(self, time_s: float) -> frozenset[str]:
        return frozenset(
            topic
            for topic, health in self.topics.items()
            if self.remaining_pause_s(health, time_s) > 0
        )

    def remaining_pause_s(self, health: TopicHealth, time_s: float) -> float:
        """Seconds until the topic is read again. 0 if the clock has been set back to before the
        pause began.
        """
        if time_s < health.paused_at_s:
            return 0.0
        return max(health.paused_at_s + self.pause_s - time_s, 0.0)

    def gauges(self, time_s: float) -> dict[str, float]:
        """The metrics of each topic that had invalid records in its last complete window."""
        values: dict[str, float] = {}
        for topic, health in self.topics.items():
            if health.invalid_frac:
                values[f"worker/invalid_frac/{topic}"] = health.invalid_frac
                values[f"worker/paused_s/{topic}"] = self.remaining_pause_s(health, time_s)
        return values
