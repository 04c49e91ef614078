"""Estimates of pass@k and of mean rewards, with confidence intervals. The problems are the random
sample, because the answers to one problem tell little about another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Z = 1.959964  # 95 % of a standard normal distribution are within -Z and Z.


class Interval(NamedTuple):
    """An estimate with the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of `k` answers is right, where
    `passed` of `samples` answers were right.

    It is 1 - C(samples - passed, k) / C(samples, k): Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", arXiv:2107.03374, equation 1. Raises ValueError unless
    1 <= k <= samples and 0 <= passed <= samples.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(
            f"pass@{k} of {passed} right answers among {samples}: need 1 <= k <= samples and 0 <="
            " passed <= samples"
        )
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def over_problems(samples: np.ndarray, passed: np.ndarray, k: int) -> tuple[Interval, int]:
    """The mean pass@k of the problems that have at least k answers, and their number. The interval
    is 0 to 1 if there is no such problem.

    `samples`, `passed`: (p,) int, the answers to each problem and the right ones among them.
    """
    enough = samples >= k
    values = np.array(
        [pass_at_k(int(n), int(c), k) for n, c in zip(samples[enough], passed[enough], strict=True)]
    )
    if not len(values):
        return Interval(0.0, 0.0, 1.0), 0
    return share(values, float(samples[enough].min()) / k), len(values)


def share(values: np.ndarray, most: float = 1.0) -> Interval:
    """The mean of `values` with Wilson's score interval (1927,
    doi:10.1080/01621459.1927.10502953). This interval stays within 0 and 1, and has a width also
    where all values are 0 or 1.

    `values`: (p,) float, between 0 and 1, one of each problem. `most`: the number of independent
    trials that the answers to one problem are worth at most.

    The number of trials in the interval is the effective one,
    mean (1 - mean) / (variance of the mean over problems): Korn and Graubard 1998, "Confidence
    intervals for proportions with small expected number of positive counts estimated from survey
    data". Miller 2024, arXiv:2411.00640, treats problems as clusters. The number is kept between p
    and p times `most`, because few problems that agree by chance prove little.
    """
    mean = float(values.mean())
    p = len(values)
    variance = float(values.var(ddof=1)) / p if p > 1 else 0.0
    if variance > 0:
        trials = mean * (1 - mean) / variance
    else:
        trials = math.inf if 0 < mean < 1 else 0.0
    n = min(max(trials, p), p * max(most, 1.0))
    middle = mean + Z**2 / (2 * n)
    spread = Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    low = (middle - spread) / (1 + Z**2 / n)
    high = (middle + spread) / (1 + Z**2 / n)
    return Interval(mean, min(max(low, 0.0), mean), max(min(high, 1.0), mean))


def mean_of_problems(samples: np.ndarray, rewards: np.ndarray) -> Interval:
    """The mean over problems of their mean reward, with 1.96 standard errors to either side (Miller
    2024, arXiv:2411.00640, section 2).

    `samples`: (p,) int, the number of answers to each problem. `rewards`: (sum of samples,) float,
    problem after problem. Problems without an answer are left out. If no problem has one, the
    estimate and its bounds are 0.
    """
    pieces = np.split(rewards.astype(np.float64), np.cumsum(samples)[:-1])
    means = np.array([piece.mean() for piece in pieces if len(piece)])
    if not len(means):
        return Interval(0.0, 0.0, 0.0)
    mean = float(means.mean())
    p = len(means)
    error = Z * float(means.std(ddof=1)) / math.sqrt(p) if p > 1 else 0.0
    return Interval(mean, mean - error, mean + error)
