"""Scores of batches, from the records of the scorer pool, in any order and perhaps repeated."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.stream.records import Scores


@dataclass
class ScoreAssembler:
    """Collects the records of `scores`, which are read in order. The first record of a batch
    counts.
    """

    # by number of the batch, each with its offset; those before `next` are gone
    batches: dict[int, tuple[Scores, int]] = field(default_factory=dict[int, tuple[Scores, int]])
    next: int = 0  # the batch that is asked for
    end: int = 0  # after the last record read

    def add(self, scores: Scores, offset: int) -> None:
        """Add the record at `offset`."""
        self.end = offset + 1
        if scores.number >= self.next:
            self.batches.setdefault(scores.number, (scores, offset))

    def has(self, number: int) -> bool:
        """Whether the scores of that batch have arrived."""
        return number in self.batches

    def take(self, number: int) -> Scores:
        """Remove and return the scores of a batch. Scores of this batch and of earlier ones are not
        collected any more.
        """
        scores, _ = self.batches[number]
        self.batches = {n: found for n, found in self.batches.items() if n > number}
        self.next = number + 1
        return scores

    @property
    def needed_from(self) -> int:
        """The offset that the next reader has to begin at, to find all scores that have not been
        taken.
        """
        return min((offset for _, offset in self.batches.values()), default=self.end)
