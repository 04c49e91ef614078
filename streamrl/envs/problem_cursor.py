"""Which problem an env replica poses next, and which of its problems are still open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from streamrl.stream.records import EnvProgress


@dataclass
class ProblemCursor:
    """Deals problem numbers to one replica: replica i of n poses i, i + n, i + 2n, ...

    No number is lost or repeated when the replica restarts, because `progress` is published in the
    same transaction as the rollouts.
    """

    progress: EnvProgress
    step: int  # the number of replicas

    def next(self, is_skipped: Callable[[int], bool] = lambda number: False) -> int:
        """Open the next problem that is not skipped, and return its number."""
        number = self.progress.next_problem
        while is_skipped(number):
            number += self.step
        self.progress = structs.replace(
            self.progress,
            next_problem=number + self.step,
            open_problems=[*self.progress.open_problems, number],
        )
        return number

    def skip(self, number: int) -> None:
        """Close an open problem of which nothing will be published."""
        self.progress = structs.replace(self.progress, open_problems=self._open_but([number]))

    def complete(self, numbers: Sequence[int]) -> EnvProgress:
        """Close the problems that are being published now. Returns the record to publish with
        them.
        """
        self.progress = structs.replace(
            self.progress,
            open_problems=self._open_but(numbers),
            published_groups=self.progress.published_groups + len(numbers),
        )
        return self.progress

    def _open_but(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in self.progress.open_problems if number not in numbers]


def resume_progress(
    producer: str, replica: int, replicas: int, known: Sequence[EnvProgress]
) -> EnvProgress:
    """The progress with which a replica begins. No problem is posed twice, whichever replica starts
    first.

    It begins at its own last position. If the number of replicas has changed since, it begins
    after the highest number that any replica has posed. `known` is the last progress of every
    replica that the env has ever had.
    """
    begins = 0
    own = None
    for progress in known:
        is_same_count = progress.replicas == replicas
        begins = max(begins, progress.begins if is_same_count else progress.next_problem)
        if progress.producer == producer:
            own = progress
    if own is None:
        own = EnvProgress(producer=producer, next_problem=replica, replicas=replicas)
        first = max(begins, replica)
    elif own.replicas == replicas:
        first = max(begins, own.next_problem)
    else:
        first = begins
    # the first number of this replica's own that is not below `first`
    next_problem = first + (replica - first) % replicas
    return structs.replace(own, next_problem=next_problem, replicas=replicas, begins=begins)
