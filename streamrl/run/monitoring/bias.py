"""Whether what is trained on is like what was launched. A pure fold of `fates`.

Rollouts that take long are the first to expire, so a run may train on shorter, easier ones than
the policy makes. Compared are the rollouts of batches with these and the expired ones together.
What the run leaves out by choice (filtered, duplicate) or cannot use (failed, invalid) is in
neither, and neither is what has no fate yet.

The mean of x over the trained rollouts is T = s1 / n1 and over all R = (s1 + s0) / (n1 + n0), where
n1, s1 are number and sum of x of those trained and n0, s0 of those expired. The rollouts of a fate
end together, so the fates are the sample. With n, s of a fate the standard error of T - R is, to
first order, the root of the sum over fates of the square of

    [trained] (s - T n) / n1  -  (s - R n) / (n1 + n0)

(a ratio of means of clusters: Cochran, Sampling Techniques, 6.13 and 9.5). It counts fates as
independent; rewards that rise during the run make neighbours alike, so an alarm also needs that T
is off by a tenth of R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from streamrl.stream.records import Fate

FEATURES = {"tokens": "length", "rewards": "reward", "turns": "turns"}
"""The columns of a fate that are compared, each with its name."""
LEAST_FATES = 20  # of each kind: with fewer, their spread is not known
LEAST_ERRORS = 4.0  # standard errors
LEAST_SHIFT = 0.1  # of what was launched


@dataclass
class Moments:
    """Sums over fates of their number of rollouts n, and of their sum s of a value."""

    fates: int = 0
    n: float = 0.0
    s: float = 0.0
    nn: float = 0.0
    ns: float = 0.0
    ss: float = 0.0

    def add(self, n: float, s: float) -> None:
        self.fates += 1
        self.n += n
        self.s += s
        self.nn += n * n
        self.ns += n * s
        self.ss += s * s

    def squares(self, a: float, b: float) -> float:
        """The sum over fates of (a s - b n)**2."""
        return a * a * self.ss - 2 * a * b * self.ns + b * b * self.nn


class Shift(NamedTuple):
    """How what was trained on differs from what was launched, in one feature of one env."""

    env: str
    feature: str
    launched: float  # mean
    trained: float  # mean
    error: float  # standard error of their difference; infinite with few fates

    @property
    def is_alarm(self) -> bool:
        """Whether the difference is more than noise, and large enough to matter."""
        difference = abs(self.trained - self.launched)
        return difference > max(LEAST_ERRORS * self.error, LEAST_SHIFT * abs(self.launched))


@dataclass
class BiasAccount:
    """The sums from which shifts follow. Its size does not grow with the run."""

    # (env, feature) -> of the fates that were trained on, and of those that expired
    trained: dict[tuple[str, str], Moments] = field(default_factory=dict[tuple[str, str], Moments])
    expired: dict[tuple[str, str], Moments] = field(default_factory=dict[tuple[str, str], Moments])

    def add(self, fate: Fate) -> None:
        """Add the rollouts of a fate."""
        account = {"batched": self.trained, "expired": self.expired}.get(fate.fate)
        if account is None or not len(fate.offsets):
            return
        for column, feature in FEATURES.items():
            values: np.ndarray | None = getattr(fate, column)
            if values is None:
                continue
            total = float(sum(values.tolist()))  # numpy takes longer for the values of a group
            if not math.isfinite(total):
                continue
            key = fate.environment, feature
            if key not in account:
                account[key] = Moments()
            account[key].add(len(values), total)

    def shifts(self) -> Iterator[Shift]:
        """The shift of each feature of each env, and of each env's share of the rollouts."""
        for (env, feature), trained in sorted(self.trained.items()):
            yield shift(env, feature, trained, self.expired.get((env, feature), Moments()))
        measured = [*self.trained, *self.expired]
        envs = sorted({env for env, feature in measured if feature == "length"})
        if len(envs) > 1:
            all_trained = _of_all_envs(self.trained)
            all_expired = _of_all_envs(self.expired)
            for env in envs:
                trained = _share(all_trained, self.trained.get((env, "length"), Moments()))
                expired = _share(all_expired, self.expired.get((env, "length"), Moments()))
                yield shift(env, "share", trained, expired)


def _of_all_envs(accounts: dict[tuple[str, str], Moments]) -> Moments:
    """The moments of the value that is 0 for every rollout."""
    together = Moments()
    for (_, feature), moments in accounts.items():
        if feature == "length":  # Every rollout has a length.
            together.fates += moments.fates
            together.n += moments.n
            together.nn += moments.nn
    return together


def _share(of_all: Moments, of_env: Moments) -> Moments:
    """The moments of the value that is 1 for the rollouts of an env, and 0 for those of others."""
    return replace(of_all, s=of_env.n, ns=of_env.nn, ss=of_env.nn)


def shift(env: str, feature: str, trained: Moments, expired: Moments) -> Shift:
    """The shift that follows from these sums. There has to be a trained or an expired rollout."""
    n = trained.n + expired.n
    launched_mean = (trained.s + expired.s) / n
    trained_mean = trained.s / trained.n if trained.n else 0.0
    error = math.inf
    if min(trained.fates, expired.fates) >= LEAST_FATES:
        a = 1 / trained.n - 1 / n
        b = trained_mean / trained.n - launched_mean / n
        of_trained = trained.squares(a, b)
        of_expired = expired.squares(1 / n, launched_mean / n)
        error = math.sqrt(max(of_trained + of_expired, 0.0))
    return Shift(env, feature, launched_mean, trained_mean, error)


def bias_report(account: BiasAccount) -> list[dict[str, Any]]:
    """The shifts as report.json has them. `standard_error` is None with few fates."""
    return [
        {
            "env": found.env,
            "feature": found.feature,
            "launched": found.launched,
            "trained": found.trained,
            "standard_error": found.error if math.isfinite(found.error) else None,
            "alarm": found.is_alarm,
        }
        for found in account.shifts()
    ]


def bias_lines(account: BiasAccount) -> list[str]:
    """A line for each alarm."""
    return [
        f"{found.env}: trained on {found.feature} {found.trained:.3g}, launched"
        f" {found.launched:.3g} (mean; +- {found.error:.2g}), because rollouts expire"
        for found in account.shifts()
        if found.is_alarm
    ]
