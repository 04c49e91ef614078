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
    by_start: dict[int, Scores] = field(default_factory=dict[int, Scores])  # by the first token

    def are_complete(self) -> bool:
        records = list(self.by_start.values())
        return sum(len(record.logprobs) for record in records) == records[0].tokens

    def joined(self) -> Scores:
        ordered = [self.by_start[start] for start in sorted(self.by_start)]
        logprobs = np.concatenate([record.logprobs for record in ordered])
        return msgspec.structs.replace(ordered[0], logprobs=logprobs)


@dataclass
class ScoreAssembler:
    """Collects the records of `scores`, which are read in order. A repeated record is ignored,
    because it says the same as the first.
    """

    # by number; those before `next` are gone
    batches: dict[int, BatchScores] = field(default_factory=dict[int, BatchScores])
    next: int = 0  # the batch that is asked for
    end: int = 0  # behind the last record read

    def add(self, scores: Scores, offset: int) -> None:
        """Add a record that lies at `offset`."""
        self.end = offset + 1
        if scores.number >= self.next:
            batch = self.batches.setdefault(scores.number, BatchScores(first=offset))
            batch.by_start.setdefault(scores.start, scores)

    def has(self, number: int) -> bool:
        """Whether all scores of that batch have arrived."""
        return number in self.batches and self.batches[number].are_complete()

    def take(self, number: int) -> Scores:
        """Remove and return the scores of a batch. Scores of this batch and of earlier ones are not
        collected any more.
        """
        scores = self.batches[number].joined()
        self.batches = {n: batch for n, batch in self.batches.items() if n > number}
        self.next = number + 1
        return scores

    @property
    def needed_from(self) -> int:
        """The offset that the next reader has to begin at, to find all scores that have not been
        taken.
        """
        return min((batch.first for batch in self.batches.values()), default=self.end)
