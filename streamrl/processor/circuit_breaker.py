"""A source that sends mostly rubbish is left alone for a while: what it wrote stays in the log,
unread, and the other sources go on.

Counted by topic over `WINDOW_RECORDS` in a row: when more than `max_frac` of them were put aside,
the topic is not read for `PAUSE_S`; then it gets another window's chance. So the damage is bounded,
a source that has been mended is taken up again by itself, and good records between bad ones come
through. Outside the fold on purpose: which records were taken when is what the journal says, so a
replay and a restart take the same ones whatever was decided here; a restarted part begins with
clean counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamrl.log.dead_letters import Letter

WINDOW_RECORDS = 1_000
PAUSE_S = 30.0


@dataclass
class Source:
    """What is known of one topic."""

    taken: int = 0  # records of this window
    invalid: int = 0
    cause: str = ""  # of the last that was put aside
    frac: float = 0.0  # invalid, of the last whole window
    since_s: float = -math.inf  # when it was last left alone


@dataclass
class Breaker:
    """Which topics to leave alone. A `max_frac` of 1 never trips."""

    max_frac: float
    window_records: int = WINDOW_RECORDS
    pause_s: float = PAUSE_S
    sources: dict[str, Source] = field(default_factory=dict[str, Source])

    def count(self, taken: Iterable[str], letters: Iterable[Letter], time_s: float) -> list[str]:
        """Note the topics of the records taken, and what was put aside of them. Returns a sentence
        for each topic that is left alone from now on.
        """
        for topic, records in Counter(taken).items():
            self.sources.setdefault(topic, Source()).taken += records
        for letter in letters:
            source = self.sources[letter.topic]
            source.invalid, source.cause = source.invalid + 1, letter.cause
        return [
            sentence
            for topic, source in self.sources.items()
            if (sentence := self.judge(topic, source, time_s))
        ]

    def judge(self, topic: str, source: Source, time_s: float) -> str:
        """At the end of a window: what to say if the topic is left alone, otherwise nothing."""
        if source.taken < self.window_records:
            return ""
        invalid, of, source.frac = source.invalid, source.taken, source.invalid / source.taken
        source.taken = source.invalid = 0
        if source.frac <= self.max_frac:
            return ""
        source.since_s = time_s
        share = f"{invalid:,} of its last {of:,} records could not be used, more than {self.max_frac:.0%}, the last because: {source.cause}"
        return f"{topic} sends rubbish and is not read for {self.pause_s:.0f} s: {share}; see `streamrl dead-letters list RUN`"

    def left_alone(self, time_s: float) -> frozenset[str]:
        """Topics to take nothing from for now."""
        return frozenset(
            topic for topic, source in self.sources.items() if self.left_s(source, time_s)
        )

    def left_s(self, source: Source, time_s: float) -> float:
        """How long it is left alone yet; not at all once the clock stands before the beginning: one
        that was set back an hour makes no hour of it.
        """
        return max(source.since_s + self.pause_s - time_s, 0.0) if time_s >= source.since_s else 0.0

    def gauges(self, time_s: float) -> dict[str, float]:
        """Of topics of which something was put aside in their last window: the share, and how long
        they are left alone yet.
        """
        values: dict[str, float] = {}
        for topic, source in self.sources.items():
            if source.frac:
                values[f"worker/invalid_frac/{topic}"] = source.frac
                values[f"worker/left_alone_s/{topic}"] = self.left_s(source, time_s)
        return values
