"""How much an env may have in flight: the work it launched and has not seen closed stays within
what the batcher wants. Exact, across restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from streamrl.records import Demand, EnvProgress

RECENT_GROUPS = 256  # that the cost of a group is the mean of, about


@dataclass
class Credit:
    """The account of one replica. Every group it launches closes exactly once in the buffer, and
    `Demand.closed_groups` counts that.
    """

    producer: str
    replicas: int
    guess_tokens: float  # of a group, before the first is complete
    demand: Demand | None = None
    launched: int = 0  # groups, since the run began
    complete: int = 0  # groups measured
    tokens: float = 0.0  # of those

    @property
    def outstanding(self) -> int:
        """Groups launched and not closed."""
        return self.launched - (
            self.demand.closed_groups.get(self.producer, 0) if self.demand else 0
        )

    @property
    def group_tokens(self) -> float:
        """What a group is expected to cost."""
        return self.tokens / self.complete if self.complete else self.guess_tokens

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding: those granted; or else this replica's share of what is
        wanted, the last group perhaps only in part.
        """
        if self.demand is None:
            return 0
        if granted := self.demand.granted_groups:
            return granted.get(self.producer, 0) - self.demand.closed_groups.get(self.producer, 0)
        return math.ceil(self.demand.wanted_tokens / self.replicas / self.group_tokens)

    def allows(self) -> bool:
        """May another group be launched?"""
        return self.outstanding < self.capacity

    def measured(self, tokens: float) -> None:
        """A group is complete: so many tokens, prompts included. One that failed says nothing about
        the size of the others.

        The mean is over about the last RECENT_GROUPS: answers grow while a policy learns.
        """
        if self.complete >= RECENT_GROUPS:
            self.complete, self.tokens = (
                RECENT_GROUPS - 1,
                self.tokens * (RECENT_GROUPS - 1) / self.complete,
            )
        self.complete, self.tokens = self.complete + 1, self.tokens + tokens


@dataclass
class Counter:
    """Which problems are whose: replica i of n takes i, i + n, i + 2n, ... None is lost or repeated
    when it restarts.
    """

    progress: EnvProgress
    step: int  # replicas

    def take(self, left_out: Callable[[int], bool] = lambda number: False) -> int:
        """The next problem that is not left out; it is open from now on."""
        number = self.progress.next_problem
        while left_out(number):
            number += self.step
        self._set(
            next_problem=number + self.step, open_problems=[*self.progress.open_problems, number]
        )
        return number

    def skip(self, number: int) -> None:
        """This problem is not for training: nothing will be published of it."""
        self._set(open_problems=[n for n in self.progress.open_problems if n != number])

    def done(self, numbers: list[int]) -> EnvProgress:
        """These problems are being published: the record that goes with them."""
        left = [number for number in self.progress.open_problems if number not in numbers]
        self._set(
            open_problems=left, published_groups=self.progress.published_groups + len(numbers)
        )
        return self.progress

    def _set(self, **changes: object) -> None:
        fields = {name: getattr(self.progress, name) for name in self.progress.__struct_fields__}
        self.progress = EnvProgress(**{**fields, **changes})  # type: ignore[arg-type]


def resumed(
    producer: str, replica: int, replicas: int, known: Sequence[EnvProgress]
) -> EnvProgress:
    """Where a replica begins: where it was, or behind everything that was posed while the env had
    more of them, or fewer.

    `known`: the last progress of every replica that the env has had, its own among them. So no
    problem is posed by two, whichever starts first.
    """
    own = next(
        (progress for progress in known if progress.producer == producer),
        EnvProgress(producer=producer, next_problem=replica),
    )
    same = [progress for progress in known if progress.replicas in (0, replicas)]
    begins = max(
        (progress.begins if progress in same else progress.next_problem for progress in known),
        default=0,
    )
    first = max(begins, own.next_problem if own in same or own not in known else 0)
    return structs.replace(
        own, next_problem=first + (replica - first) % replicas, replicas=replicas, begins=begins
    )
