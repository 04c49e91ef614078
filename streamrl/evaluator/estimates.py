"""From right answers to pass@k, and how sure that is. Problems are what was drawn at random;
answers to one problem say little about another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Z = 1.959964  # standard normal: 95 % lie within


class Interval(NamedTuple):
    """An estimate, and the bounds that it lies between with 95 % confidence."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` answers is right, without bias, from `passed` right ones
    among `samples` >= k.

    1 - C(samples - passed, k) / C(samples, k): Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", arXiv:2107.03374, equation 1.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(
            f"pass@{k} of {passed} right answers among {samples}: need 1 <= k <= samples and 0 <="
            " passed <= samples"
        )
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def over_problems(samples: np.ndarray, passed: np.ndarray, k: int) -> tuple[Interval, int]:
    """pass@k in the mean of the problems with at least k answers, and how many those are; of none,
    0 to 1. Both arrays (p,) int, one a problem.
    """
    enough = samples >= k
    values = np.array(
        [pass_at_k(int(n), int(c), k) for n, c in zip(samples[enough], passed[enough], strict=True)]
    )
    if not len(values):
        return Interval(0.0, 0.0, 1.0), 0
    return share(values, float(samples[enough].min()) / k), len(values)


def share(values: np.ndarray, most: float = 1.0) -> Interval:
    """The mean of (p,) values between 0 and 1, with Wilson's score interval (1927,
    doi:10.1080/01621459.1927.10502953): it never leaves 0 to 1, and is of use where all values are
    0 or 1.

    Its trials are the effective number, mean (1 - mean) / (variance of the mean over problems):
    Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of
    positive counts estimated from survey data"; problems as clusters: Miller 2024,
    arXiv:2411.00640. At least p, and at most p times `most`, the independent trials that a
    problem's answers are: few problems that agree by chance prove little.
    """
    mean = float(values.mean())
    p = len(values)
    variance = float(values.var(ddof=1)) / p if p > 1 else 0.0
    trials = mean * (1 - mean) / variance if variance > 0 else math.inf if 0 < mean < 1 else 0.0
    n = min(max(trials, p), p * max(most, 1.0))
    middle = mean + Z**2 / (2 * n)
    spread = Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    low = (middle - spread) / (1 + Z**2 / n)
    high = (middle + spread) / (1 + Z**2 / n)
    return Interval(mean, min(max(low, 0.0), mean), max(min(high, 1.0), mean))


def mean_of_problems(samples: np.ndarray, rewards: np.ndarray) -> Interval:
    """The mean over problems of their mean reward, and 1.96 standard errors of it to either side
    (Miller 2024, arXiv:2411.00640, section 2).

    `samples`: (p,) answers to each; `rewards`: (sum of samples,), problem after problem. Those
    without an answer are left out; of none, all is 0.
    """
    pieces = np.split(rewards.astype(np.float64), np.cumsum(samples)[:-1])
    means = np.array([piece.mean() for piece in pieces if len(piece)])
    if not len(means):
        return Interval(0.0, 0.0, 0.0)
    mean = float(means.mean())
    p = len(means)
    error = Z * float(means.std(ddof=1)) / math.sqrt(p) if p > 1 else 0.0
    return Interval(mean, mean - error, mean + error)
