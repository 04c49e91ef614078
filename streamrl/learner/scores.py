"""Scores of batches, from the records of the scorer pool, which arrive in any order and may repeat.

Earlier versions of streamrl wrote the scores of a large batch as several records, each with the
logprobs of some of its tokens. These are joined here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from streamrl.records import Scores


@dataclass
class BatchScores:
    """The records of one batch: one, or several from an earlier version of streamrl."""

    first: int  # where the first record lies
    # by the tokens that they say the batch has, and the first token that they are of
    by_place: dict[tuple[int, int], Scores] = field(default_factory=dict[tuple[int, int], Scores])

    def add(self, scores: Scores) -> None:
        """Keep the record, unless one of the same place has as many tokens."""
        place = (scores.tokens, scores.start)
        known = self.by_place.get(place)
        if known is None or len(known.logprobs) < len(scores.logprobs):
            self.by_place[place] = scores

    def records(self) -> list[Scores]:
        """The records that together have the scores of all tokens, in order. Empty if some are
        missing.
        """
        for tokens in dict.fromkeys(total for total, _ in self.by_place):
            found: list[Scores] = []
            start = 0
            while (record := self.by_place.get((tokens, start))) is not None:
                found.append(record)
                start += len(record.logprobs)
                if start == tokens:
                    return found
                if not len(record.logprobs):
                    break
        return []


@dataclass
class ScoreAssembler:
    """Collects the records of `scores`, which are read in order. A repeated record is ignored,
    because it says the same as the first, and one with fewer tokens makes way for a longer one.
    """

    # by number; those before `next` are gone
    batches: dict[int, BatchScores] = field(default_factory=dict[int, BatchScores])
    next: int = 0  # the batch that is asked for
    end: int = 0  # behind the last record read

    def add(self, scores: Scores, offset: int) -> None:
        """Add a record that lies at `offset`."""
        self.end = offset + 1
        if scores.number >= self.next:
            self.batches.setdefault(scores.number, BatchScores(first=offset)).add(scores)

    def has(self, number: int) -> bool:
        """Whether all scores of that batch have arrived."""
        return number in self.batches and bool(self.batches[number].records())

    def take(self, number: int) -> Scores:
        """Remove and return the scores of a batch. Scores of this batch and of earlier ones are not
        collected any more.
        """
        records = self.batches[number].records()
        logprobs = np.concatenate([record.logprobs for record in records])
        self.batches = {n: batch for n, batch in self.batches.items() if n > number}
        self.next = number + 1
        return msgspec.structs.replace(records[0], logprobs=logprobs)

    @property
    def needed_from(self) -> int:
        """The offset that the next reader has to begin at, to find all scores that have not been
        taken.
        """
        return min((batch.first for batch in self.batches.values()), default=self.end)
