"""Tells a part's log what became of records that were not used: which rollouts failed and what was
put aside, now and then, with the last cause.

Every record of it is in `fates` and in dead letters; a producer that sends nothing useful is to be
noticed without looking there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from streamrl.config import topology
from streamrl.log.codec import DecodeError, decode
from streamrl.log.dead_letters import DeadLetter, printable
from streamrl.log.protocol import Message
from streamrl.records import Fate

EVERY_S = 10.0  # between two sentences


class Notices:
    """Counts since the last sentences, by the env or the topic that the records are of."""

    def __init__(self) -> None:
        self._failed = Counter[str]()
        self._aside = Counter[str]()
        # whose -> "failed" or "put aside" -> the last cause
        self._causes: defaultdict[str, dict[str, str]] = defaultdict(dict[str, str])
        self._told_s: float | None = None

    def take(self, failed: Iterable[Fate], letters: Iterable[DeadLetter]) -> None:
        for fate in failed:
            self._failed[fate.environment] += len(fate.offsets)
            self._causes[fate.environment]["failed"] = fate.cause
        for letter in letters:
            whose = letter.topic.removeprefix("rollouts.")
            self._aside[whose] += 1
            self._causes[whose]["put aside"] = letter.cause

    def due(self, now_s: float) -> list[str]:
        """Sentences, at most every `EVERY_S`; the first at once. `now_s`: by a clock that nobody
        sets.
        """
        if not self._causes or (self._told_s is not None and now_s - self._told_s < EVERY_S):
            return []
        self._told_s = now_s
        sentences = [self._sentence(whose) for whose in self._causes]
        self._failed.clear()
        self._aside.clear()
        self._causes.clear()
        return sentences

    def _sentence(self, whose: str) -> str:
        counts = {"failed": self._failed[whose], "put aside": self._aside[whose]}
        said = [
            f"{counts[what]:,} {what} (last: {printable(cause) or 'no cause given'})"
            for what, cause in self._causes[whose].items()
        ]
        where = ": `streamrl dead-letters list RUN`" if counts["put aside"] else ""
        return f"{whose}: {', '.join(said)}{where}"


def failures(messages: Iterable[Message]) -> list[Fate]:
    """The fates of failed rollouts among a turn's outputs."""
    found: list[Fate] = []
    for message in messages:
        if (
            message.topic == topology.FATES
            and message.value is not None
            and b"failed" in message.value
        ):
            try:
                fate = decode("fate/1", message.value)
            except DecodeError:  # one that was put aside as it came; not ours
                continue
            if isinstance(fate, Fate) and fate.fate == "failed":
                found.append(fate)
    return found
