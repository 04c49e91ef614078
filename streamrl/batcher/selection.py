"""Which groups train next: every env gets its share of the tokens, the oldest of the groups that
were asked for come first (`EnvQueue.candidate`), and groups stay whole.

This is deficit round robin (Shreedhar & Varghese, SIGCOMM 1995) with a batch for a round. What an
env got too much or too little is its deficit, which is carried over. So the shares hold over the
run although groups have any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

# The share that no env has a right to: what the fractions leave. It goes evenly to the envs that
# have more than their own share needs.
REMAINDER = ""
DATA = "*"  # what a batch waits for while no share is complete


class Candidate(NamedTuple):
    """A group that the batch may take."""

    env: str
    position: int  # in the queue of its env
    tokens: int


# (env, n) -> group number n of the env, in the order in which it offers them; None: it has no more
Offer = Callable[[str, int], Candidate | None]


class Selection(NamedTuple):
    """The groups of a batch, or what it lacks."""

    chosen: list[Candidate]  # in the order taken
    charged: dict[str, int]  # tokens by the share they count against: an env, or REMAINDER
    short: dict[str, int]  # tokens that a share lacks; empty: the batch is full
    # By share that is short: it comes up short again until groups of more tokens than this have
    # come for other shares.
    retry_after_tokens: dict[str, int]


def quotas(fractions: Mapping[str, float]) -> dict[str, float]:
    """The fractions of a batch by share, with what they leave under REMAINDER."""
    shares = {env: fraction for env, fraction in fractions.items() if fraction > 0}
    shares[REMAINDER] = max(1.0 - sum(fractions.values()), 0.0)
    return shares


def tokens_owed(
    fractions: Mapping[str, float], deficit: Mapping[str, float], budget: int
) -> dict[str, float]:
    """Tokens that a batch of `budget` tokens owes each share."""
    return {
        share: fraction * budget + deficit.get(share, 0.0)
        for share, fraction in quotas(fractions).items()
    }


def shortage(
    supply: Mapping[str, int], owed: Mapping[str, float], budget: int, spill: bool
) -> dict[str, int]:
    """Tokens that each share lacks while all envs together have less than a batch. Empty: it is
    worth selecting.

    `supply`: tokens of each env. `owed`: tokens of each share (`tokens_owed`).
    """
    if sum(supply.values()) >= budget:
        return {}
    lacking = {share: due - supply.get(share, 0) for share, due in owed.items()}
    surplus = 0.0
    for env, tokens in supply.items():
        due = owed.get(env, 0.0)
        if tokens > due:
            surplus += tokens - max(due, 0.0)
    lacking[REMAINDER] = owed[REMAINDER] - surplus
    if spill:
        of_envs = sum(max(tokens, 0.0) for share, tokens in lacking.items() if share != REMAINDER)
        lacking = {REMAINDER: owed[REMAINDER] + of_envs - surplus}
    return {share: int(tokens) for share, tokens in lacking.items() if tokens >= 1}


def waits_for(short: Mapping[str, int], fractions: Mapping[str, float]) -> str:
    """What a batch that is short of these tokens waits for: the share that lacks most while other
    shares are complete, or DATA while none is.
    """
    wanted = [share for share, fraction in quotas(fractions).items() if fraction > 0]
    if all(share in short for share in wanted):
        return DATA
    return max(short, key=lambda share: short[share])


def select(
    supply: Mapping[str, int], offer: Offer, owed: Mapping[str, float], budget: int, spill: bool
) -> Selection:
    """Take groups, always for the share that lacks most tokens, until the next one would not fit in
    `budget` tokens.

    `supply`: tokens of each env. `offer`: its groups. `owed`: tokens of each share (`tokens_owed`).
    With `spill`, what an env cannot supply is taken from the others. Without, its share is `short`
    and the batch has to wait.

    `retry_after_tokens` is how many tokens must arrive before another attempt can differ: a share
    is found short only when it lacks most, so smaller additions of other envs cannot change that.
    It is not computed if the fractions leave a remainder, because every group may change the env
    that the remainder takes from.
    """
    shares = _Shares(supply, owed)
    chosen = list[Candidate]()
    short = dict[str, int]()
    retry_after_tokens = dict[str, int]()
    total = 0
    while (share := shares.pop_most_lacking()) is not None:
        group = shares.next_group(share, offer)
        if group is None:
            if spill and share != REMAINDER:
                shares.spill(share)
                continue
            short[share] = int(shares.lacking(share))
            if shares.need[REMAINDER] < 1:
                retry_after_tokens[share] = budget - total
            continue
        if total + group.tokens > budget:
            break
        chosen.append(group)
        total += group.tokens
        shares.charge(share, group)
    return Selection(chosen, shares.charged, short, retry_after_tokens)


class _Shares:
    """What each share needs and is charged while groups are selected, and what is left of each
    env.
    """

    def __init__(self, supply: Mapping[str, int], owed: Mapping[str, float]) -> None:
        self.need = dict(owed)
        self.charged = dict.fromkeys(self.need, 0)
        self._left = dict(supply)
        self._taken = dict.fromkeys(supply, 0)  # groups
        self._of_remainder = dict.fromkeys(supply, 0)  # tokens that the remainder has taken
        self._orders = {share: order for order, share in enumerate(self.need)}
        # The share that lacks most comes first; of equals, the one that was named first.
        self._queue = [(-tokens, self._orders[share], share) for share, tokens in owed.items()]
        heapify(self._queue)

    def lacking(self, share: str) -> float:
        return self.need[share] - self.charged[share]

    def pop_most_lacking(self) -> str | None:
        """The share that lacks most. It is taken out until it is charged. None where no share lacks
        a token.
        """
        if not self._queue or -self._queue[0][0] < 1:
            return None
        return heappop(self._queue)[2]

    def next_group(self, share: str, offer: Offer) -> Candidate | None:
        """The group that the share takes next. None where there is none."""
        env = share
        if share == REMAINDER:
            lacking = {other: self.lacking(other) for other in self.need}
            env = pick_surplus_env(self._left, lacking, self._of_remainder)
        return offer(env, self._taken[env]) if env in self._taken else None

    def charge(self, share: str, group: Candidate) -> None:
        """Charge the share for a group."""
        env = group.env
        tokens = group.tokens
        self._taken[env] += 1
        self._left[env] -= tokens
        self.charged[share] += tokens
        if share == REMAINDER:
            self._of_remainder[env] += tokens
        heappush(self._queue, (-self.lacking(share), self._orders[share], share))

    def spill(self, share: str) -> None:
        """Let the remainder take what the share lacks."""
        self.need[REMAINDER] += self.lacking(share)
        self.need[share] = self.charged[share]
        self._queue = [(-self.lacking(other), order, other) for _, order, other in self._queue]
        heapify(self._queue)


def pick_surplus_env(
    left: Mapping[str, int], lacking: Mapping[str, float], of_remainder: Mapping[str, int]
) -> str:
    """The env that the remainder takes from next: of those with more tokens left than their own
    share lacks, the one that has given it least. REMAINDER where there is none.
    """
    able = [env for env, tokens in left.items() if tokens > max(lacking.get(env, 0.0), 0.0)]
    return min(able, key=lambda env: of_remainder[env], default=REMAINDER)


def charged_for(selection: Selection, taken: int) -> dict[str, int]:
    """Tokens that each share is charged when only the first `taken` groups were taken."""
    charged = dict(selection.charged)
    for candidate in selection.chosen[taken:]:
        share = candidate.env if charged.get(candidate.env) else REMAINDER
        charged[share] -= candidate.tokens
    return charged


def carry_deficit(
    fractions: Mapping[str, float],
    deficit: Mapping[str, float],
    charged: Mapping[str, int],
    spill: bool,
) -> dict[str, float]:
    """The deficit after a batch: what each share was due of the tokens really taken, less what it
    got.

    With `spill` an env does not catch up later on what the others supplied in its place.
    """
    if spill:
        return dict.fromkeys(quotas(fractions), 0.0)
    total = sum(charged.values())
    return {
        share: deficit.get(share, 0.0) + fraction * total - charged.get(share, 0)
        for share, fraction in quotas(fractions).items()
    }


def rebase_deficit(
    fractions: Mapping[str, float], deficit: Mapping[str, float]
) -> dict[str, float]:
    """The deficit under fractions that may have changed: what a share that is gone was owed, or
    owes, goes to the others by their fractions.

    Otherwise every batch from then on would be too small, or too large, by that much.
    """
    quota = quotas(fractions)
    gone = sum(tokens for share, tokens in deficit.items() if share not in quota)
    return {share: deficit.get(share, 0.0) + gone * part for share, part in quota.items()}
