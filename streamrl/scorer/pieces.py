"""The scores of a batch as records, and records in whatever order they come as the scores of
batches, each once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from streamrl.records import Batch, Scores

PIECE_TOKENS = 1_000_000  # of one record: 4 MB


def split(
    batch: Batch,
    logprobs: np.ndarray,
    scorer: str,
    reference: int,
    limit_tokens: int = PIECE_TOKENS,
) -> list[Scores]:
    """One record where the batch is small enough, otherwise several. `logprobs`: (sum of lengths,)
    float32.
    """
    starts = range(0, max(len(logprobs), 1), limit_tokens)
    piece = partial(
        Scores, number=batch.number, scorer=scorer, reference=reference, tokens=len(logprobs)
    )
    return [piece(start=start, logprobs=logprobs[start : start + limit_tokens]) for start in starts]


@dataclass
class Pieces:
    """Of one batch, from one worker."""

    found: dict[int, Scores] = field(default_factory=dict[int, Scores])  # by start
    first: int = -1  # where the first one lies

    def whole(self) -> bool:
        return (
            sum(len(piece.logprobs) for piece in self.found.values())
            == next(iter(self.found.values())).tokens
        )

    def joined(self) -> Scores:
        ordered = [self.found[start] for start in sorted(self.found)]
        return msgspec.structs.replace(
            ordered[0], logprobs=np.concatenate([piece.logprobs for piece in ordered])
        )


@dataclass
class Collected:
    """What lies in `scores`, read in order. What comes again is passed over: it says the same, and
    the first has it.
    """

    # by batch; those before `next` are gone
    numbers: dict[int, Pieces] = field(default_factory=dict[int, Pieces])
    next: int = 0  # the batch that is asked for
    end: int = 0  # behind the last record read

    def add(self, scores: Scores, offset: int) -> None:
        """A record, and where it lies."""
        self.end = offset + 1
        if scores.number >= self.next:
            pieces = self.numbers.setdefault(scores.number, Pieces(first=offset))
            pieces.found.setdefault(scores.start, scores)

    def has(self, number: int) -> bool:
        """Are all the scores of that batch there?"""
        return number in self.numbers and self.numbers[number].whole()

    def take(self, number: int) -> Scores:
        """Those of a batch that it has; batches up to it will not be asked for any more."""
        found = self.numbers[number].joined()
        self.numbers, self.next = (
            {n: pieces for n, pieces in self.numbers.items() if n > number},
            number + 1,
        )
        return found

    @property
    def needed_from(self) -> int:
        """Where the next reader has to begin to find all that has not been asked for."""
        return min((pieces.first for pieces in self.numbers.values()), default=self.end)
