"""The scores that the pool writes, in whatever order they come, as the scores of batches, each once.

Earlier versions of streamrl wrote the scores of a large batch as several records, each with the
logprobs of some of its tokens; these are put together here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from streamrl.records import Scores


@dataclass
class BatchScores:
    """What has come for one batch: one record, or several from an earlier version of streamrl."""

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
    """What lies in `scores`, read in order. What comes again is passed over: it says the same, and
    the first has it.
    """

    # by batch; those before `next` are gone
    numbers: dict[int, BatchScores] = field(default_factory=dict[int, BatchScores])
    next: int = 0  # the batch that is asked for
    end: int = 0  # behind the last record read

    def add(self, scores: Scores, offset: int) -> None:
        """Take a record in, and where it lies."""
        self.end = offset + 1
        if scores.number >= self.next:
            found = self.numbers.setdefault(scores.number, BatchScores(first=offset))
            found.by_start.setdefault(scores.start, scores)

    def has(self, number: int) -> bool:
        """Are all the scores of that batch there?"""
        return number in self.numbers and self.numbers[number].are_complete()

    def take(self, number: int) -> Scores:
        """Those of a batch that it has; batches up to it will not be asked for any more."""
        found = self.numbers[number].joined()
        self.numbers = {n: scores for n, scores in self.numbers.items() if n > number}
        self.next = number + 1
        return found

    @property
    def needed_from(self) -> int:
        """Where the next reader has to begin to find all that has not been asked for."""
        return min((scores.first for scores in self.numbers.values()), default=self.end)
