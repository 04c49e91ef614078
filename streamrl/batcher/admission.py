"""How much work may be under way: being generated, waiting in a group, or waiting for a batch. The
age limit, which drops what is too old, applies as well.

Batches are trained in order, one a version, so work that is begun now is for a batch of a known
number: the one after all that is under way. Each rule gives the number that may be the last, and
`capacity` turns that into tokens. A rule that is not shipped is named in the run file as
MODULE:FUNCTION.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from streamrl.config.choices import ADMISSIONS
from streamrl.config.plugins import import_choice

Admission = Callable[[int, int, int], int]
"""(version, lookahead, max_age), all in versions, to the number of the last batch that work begun
now may be for.
"""


def by_demand(version: int, lookahead: int, max_age: int) -> int:
    """i + min(lookahead + 1, max_age): the batches that may be built already, and the one after
    them. Work is begun just in time.
    """
    return version + min(lookahead + 1, max_age)


def by_capacity(version: int, lookahead: int, max_age: int) -> int:
    """floor((N_r - 1) / B) <= i + eta, with N_r rollouts begun, the one that asks among them, and B
    to a batch. AReaL, arXiv:2505.24298, eq. 3, whose eta is `max_age` here.

    The left side is the number of the batch that rollout N_r is for. With `max_age` 0 training is
    synchronous; with more, the policy is at most that many versions ahead.
    """
    return version + max_age


def admission_named(name: str) -> Admission:
    """The shipped rule of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return import_choice(name, "batcher.admission", ADMISSIONS)


def capacity(batches: float, batch_tokens: int, owed_tokens: float, held_tokens: int) -> int:
    """Tokens that an env may have in flight; at least 0, rounded up.

    They are what it is due of the batches to come (`batches`: its shares of them added up) and is
    owed of earlier batches, less what is held of it already.
    """
    due_tokens = math.ceil(batches * batch_tokens + owed_tokens)
    return max(due_tokens - held_tokens, 0)


def grants(granted: Mapping[str, int], closed: Mapping[str, int], groups: int) -> dict[str, int]:
    """The groups that each producer may have begun since the run began: `granted`, and more, one at
    a time, for the producer with the fewest open groups.

    No more are granted once the open groups of all producers (granted less `closed`) are as many as
    `groups`. Nothing is taken back here; `demand.update_grants` does so for absent producers. So
    what all producers have begun and not seen closed is within the capacity, although none knows of
    the others.
    """
    new_grants = {
        producer: max(count, closed.get(producer, 0)) for producer, count in granted.items()
    }
    open_groups = {
        producer: count - closed.get(producer, 0) for producer, count in new_grants.items()
    }
    for _ in range(sum(open_groups.values()), groups if open_groups else 0):
        producer = min(open_groups, key=lambda p: open_groups[p])
        open_groups[producer] += 1
        new_grants[producer] += 1
    return new_grants
