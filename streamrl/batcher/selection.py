"""Which groups train next: every env its share of the tokens, newest groups first, whole groups
only.

Deficit round robin (Shreedhar & Varghese, SIGCOMM 1995) with a batch for a round: what an env got
too much or too little is carried over, so the shares hold over the run although groups have any
size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

# the pseudo-env that stands for what the fractions leave: it goes evenly to the envs that have more
# than their own share needs
REST = ""
DATA = "*"  # what a batch waits for while no share is complete


class Candidate(NamedTuple):
    """A group that the batch may take."""

    env: str
    place: int  # in its env's pool
    tokens: int


# an env's group number n, the newest is 0; None: it has no more
Offer = Callable[[str, int], Candidate | None]


class Selection(NamedTuple):
    chosen: list[Candidate]  # in the order taken
    paid: dict[str, int]  # tokens by the share they count against: an env, or REST
    short: dict[str, int]  # tokens that a share lacks; empty: the batch is full
    # of a share that is short: it comes up short again, whatever groups of up to so many tokens
    # come for others
    futile: dict[str, int]


def shares(fractions: Mapping[str, float]) -> dict[str, float]:
    """The fractions, and under REST what they leave."""
    return {
        **{env: fraction for env, fraction in fractions.items() if fraction > 0},
        REST: max(1.0 - sum(fractions.values()), 0.0),
    }


def needs(
    fractions: Mapping[str, float], balance: Mapping[str, float], budget: int
) -> dict[str, float]:
    """Tokens that a batch of `budget` tokens owes each share."""
    return {
        share: fraction * budget + balance.get(share, 0.0)
        for share, fraction in shares(fractions).items()
    }


def shortage(
    supply: Mapping[str, int], owed: Mapping[str, float], budget: int, spill: bool
) -> dict[str, int]:
    """Tokens each share lacks while there is less than a batch altogether; empty: it is worth
    selecting. `supply`: tokens of each env.
    """
    if sum(supply.values()) >= budget:
        return {}
    lacking = {share: due - supply.get(share, 0) for share, due in owed.items() if share != REST}
    spare_tokens = sum(
        tokens - max(owed.get(env, 0.0), 0.0)
        for env, tokens in supply.items()
        if tokens > owed.get(env, 0.0)
    )
    lacking[REST] = owed[REST] - spare_tokens
    if spill:
        lacking = {
            REST: owed[REST]
            + sum(max(tokens, 0.0) for share, tokens in lacking.items() if share != REST)
            - spare_tokens
        }
    return {share: int(tokens) for share, tokens in lacking.items() if tokens >= 1}


def waits_for(short: Mapping[str, int], fractions: Mapping[str, float]) -> str:
    """What a batch that is short of these tokens, by share, waits for: the share that lacks most
    while others have theirs, DATA while none has.
    """
    wanted = [share for share, fraction in shares(fractions).items() if fraction > 0]
    return (
        DATA
        if all(share in short for share in wanted)
        else max(short, key=lambda share: short[share])
    )


def select(
    supply: Mapping[str, int], offer: Offer, owed: Mapping[str, float], budget: int, spill: bool
) -> Selection:
    """Take groups, always for the share that lacks most tokens, until the next one would not fit in
    `budget` tokens.

    `supply`: tokens of each env, `offer`: its groups, `owed`: tokens of each share (`needs`). With
    `spill`, what an env cannot supply is taken from the others; without, its share is `short` and
    the batch has to wait.

    A share comes up short when it is the one that lacks most. Each env has taken just enough groups
    by then to lack less; another group of an env, wherever it is in their order, makes that more by
    its own tokens at most. So while these fit into the budget too, the batch does not end before
    that share's turn, and trying again is futile. (Not where the fractions leave a rest: whom it
    takes from changes with every group.)
    """
    need, left = dict(owed), dict(supply)
    chosen: list[Candidate] = []
    paid, of_rest, taken = dict.fromkeys(need, 0), dict.fromkeys(left, 0), dict.fromkeys(left, 0)
    short, futile = dict[str, int](), dict[str, int]()
    total = 0
    # who lacks most is first; of equals, the one named first
    queue = [(-tokens, place, share) for place, (share, tokens) in enumerate(need.items())]
    heapify(queue)
    while queue and -queue[0][0] >= 1:
        _, place, share = heappop(queue)
        lacking = need[share] - paid[share]
        env = share or spare(left, {e: need[e] - paid[e] for e in need}, of_rest)
        head = offer(env, taken[env]) if env in taken else None
        if head is None:
            if spill and share != REST:
                need[REST] += lacking
                need[share] = paid[share]
                queue = [(paid[s] - need[s], p, s) for _, p, s in queue]
                heapify(queue)
            else:
                short[share] = int(lacking)
                if need[REST] < 1:
                    futile[share] = budget - total
        elif total + head.tokens > budget:
            break
        else:
            chosen.append(head)
            taken[env] += 1
            left[env] -= head.tokens
            paid[share] += head.tokens
            of_rest[env] += 0 if share else head.tokens
            total += head.tokens
            heappush(queue, (paid[share] - need[share], place, share))
    return Selection(chosen, paid, short, futile)


def spare(left: Mapping[str, int], lacking: Mapping[str, float], of_rest: Mapping[str, int]) -> str:
    """The env that the rest takes from next: of those with more tokens left than their own share
    lacks, the one that has given it least.
    """
    able = [env for env, tokens in left.items() if tokens > max(lacking.get(env, 0.0), 0.0)]
    return min(able, key=lambda env: of_rest[env], default=REST)


def carry(
    fractions: Mapping[str, float],
    balance: Mapping[str, float],
    paid: Mapping[str, int],
    spill: bool,
) -> dict[str, float]:
    """The balance after a batch: what each share was due of the tokens really taken, less what it
    got.

    With `spill` nobody catches up later on what the others filled in for it.
    """
    total = sum(paid.values())
    after = {
        share: balance.get(share, 0.0) + fraction * total - paid.get(share, 0)
        for share, fraction in shares(fractions).items()
    }
    return dict.fromkeys(after, 0.0) if spill else after


def rebased(fractions: Mapping[str, float], balance: Mapping[str, float]) -> dict[str, float]:
    """The balance under fractions that may have changed: what a share that is gone was owed, or
    owes, goes to the others by their fractions.

    Otherwise every batch from then on would be too small, or too large, by that much.
    """
    share = shares(fractions)
    gone = sum(tokens for name, tokens in balance.items() if name not in share)
    return {name: balance.get(name, 0.0) + gone * fraction for name, fraction in share.items()}
