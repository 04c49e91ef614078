"""The fate of every sampled token, by env, age and length. A pure fold of `fates`.

An example. Batch 7 trains on a rollout of 10 tokens that version 5 sampled, and another of version
3 with 6 tokens expires when version 6 is the newest: of 16 tokens, 10 are batched at age 2, and 6
expired at age 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.stream.records import Fate

OLDEST = 8  # Ages from here on are one.
UNKNOWN = "unknown"  # the age of a rollout whose version could not be read
LONGEST = 31  # bits of a number of tokens


@dataclass
class TokenAccount:
    """Sampled tokens by fate. Its size does not grow with the run."""

    by_env: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    by_age: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    by_length: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    uncounted: int = 0  # rollouts that could not be read, or whose records retention has deleted

    def add(self, fate: Fate, newest: int) -> None:
        """Add the tokens of a fate. `newest`: the newest version when the rollouts met it, from
        which the age of those that are in no batch follows.
        """
        if fate.tokens is None:
            self.uncounted += len(fate.offsets)
            return
        tokens = fate.tokens.astype(np.int64)
        self.by_env[fate.environment, fate.fate] += int(tokens.sum())
        for bucket, count in _sums(np.frexp(tokens)[1], tokens):
            self.by_length[length_name(bucket), fate.fate] += count
        if fate.policy_versions is None:
            self.by_age[UNKNOWN, fate.fate] += int(tokens.sum())
            return
        versions = fate.policy_versions.astype(np.int64)
        ages = (newest if fate.batch is None else fate.batch) - versions
        for age, count in _sums(np.clip(ages, 0, OLDEST), tokens):
            self.by_age[age_name(age), fate.fate] += count

    @property
    def sampled(self) -> int:
        """The tokens of all fates."""
        return self.by_env.total()

    def of_fate(self, fate: str) -> int:
        """The tokens of one fate."""
        return sum(count for (_, name), count in self.by_env.items() if name == fate)

    def share(self, fate: str) -> float | None:
        """The share of one fate among all tokens, or None without any token."""
        return self.of_fate(fate) / self.sampled if self.sampled else None


def _sums(keys: np.ndarray, tokens: np.ndarray) -> Iterable[tuple[int, int]]:
    """The sum of the tokens that have each key. `keys`, `tokens`: (n,) int."""
    distinct, places = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, places, tokens)
    return zip(distinct.tolist(), sums.tolist(), strict=True)


def age_name(age: int) -> str:
    return str(age) if age < OLDEST else f"{OLDEST} or more"


def length_name(bucket: int) -> str:
    """The lengths of a bucket: "4 to 7" has those of three binary digits."""
    if bucket <= 1:
        return str(bucket)
    return f"{2 ** (bucket - 1)} to {2**bucket - 1}"


LENGTH_NAMES = [length_name(bucket) for bucket in range(LONGEST + 1)]
AGE_NAMES = [*map(age_name, range(OLDEST + 1)), UNKNOWN]


def token_report(account: TokenAccount) -> dict[str, Any]:
    """The account as report.json has it: tokens by fate, with shares in percent. The tokens of the
    fates add up to `sampled`, and so do those by env, by age and by length.
    """
    fates = sorted({fate for _, fate in account.by_env})
    ages = _nested(account.by_age)
    lengths = _nested(account.by_length)
    return {
        "sampled": account.sampled,
        "uncounted_rollouts": account.uncounted,
        "fates": {fate: account.of_fate(fate) for fate in fates},
        "percent": {fate: round(100 * (account.share(fate) or 0.0), 2) for fate in fates},
        "envs": dict(sorted(_nested(account.by_env).items())),
        "ages": {name: ages[name] for name in AGE_NAMES if name in ages},
        "lengths": {name: lengths[name] for name in LENGTH_NAMES if name in lengths},
    }


def _nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    nested = dict[str, dict[str, int]]()
    for (key, fate), count in sorted(counts.items()):
        nested.setdefault(key, {})[fate] = count
    return nested
