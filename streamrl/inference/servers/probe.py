"""Decides by a server's logprobs and the learner's whether both compute the same model."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from streamrl.config.run_file import RunFile

# In low precision, at most one token in TOKENS_PER_OUTLIER may be off by more than OUTLIER_FACTOR
# tolerances (docs/models.md has what was measured).
TOKENS_PER_OUTLIER = 20
OUTLIER_FACTOR = 4.0


# nats: one wrong matrix of 210 of a model of 135 million parameters made logprobs differ by 0.25
# to 0.6 in the mean, and rounding of bfloat16 by 0.03 to 0.08.
WRONG_MODEL = 0.2
MARGIN = 1.5  # What the advised tolerance leaves above the difference that was measured.


class Mismatch(NamedTuple):
    """The distance between two sets of logprobs."""

    max_abs: float  # the largest absolute difference
    tokens: int  # the number of tokens that were compared
    mean_abs: float = 0.0  # the mean absolute difference
    # The absolute difference that at most one token in TOKENS_PER_OUTLIER exceeds.
    common_abs: float = 0.0


class ProbeTolerance(NamedTuple):
    """How far apart logprobs of the same model may be."""

    value: float  # inference.probe_tolerance
    low_precision: bool = False  # learner or server compute with fewer bits than float32

    def accepts(self, mismatch: Mismatch) -> bool:
        """Whether the two compute the same. In float32 no token may be off by more than the
        tolerance. In low precision a few tokens are far off, and many a little, so it bounds the
        mean, and most tokens.
        """
        if not self.low_precision:
            return mismatch.max_abs <= self.value
        most_abs = OUTLIER_FACTOR * self.value
        return mismatch.mean_abs <= self.value and mismatch.common_abs <= most_abs

    def advice(self, mismatch: Mismatch) -> str:
        """The advice about a mismatch that is not accepted: the cause, or the tolerance to set."""
        needed = mismatch.max_abs
        if self.low_precision:
            needed = max(mismatch.mean_abs, mismatch.common_abs / OUTLIER_FACTOR)
        if not needed <= WRONG_MODEL:
            return (
                "rounding alone does not explain that: a weight was not reloaded, or the two do not"
                " compute the same model; look at the model's config.json and inference.extra_args"
            )
        return (
            "if the two compute the same model in different precisions, set"
            f" inference.probe_tolerance to {_rounded_up(MARGIN * needed):g} (docs/models.md)"
        )


def _rounded_up(value: float) -> float:
    """The value with two digits, and not below it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit


def probe_tolerance(run: RunFile) -> ProbeTolerance:
    """The tolerance for the servers of a run."""
    precisions = (run.learner.precision, run.inference.dtype)
    is_low = any(precision != "float32" for precision in precisions)
    return ProbeTolerance(run.inference.probe_tolerance, is_low)


def compare_logprobs(expected: np.ndarray, measured: np.ndarray) -> Mismatch:
    """|expected - measured| over the tokens that both have: a server's context may be shorter than
    the probe. `expected`: (n,) float32; `measured`: (m,) float32.

    The distance of a value that is NaN is infinite. Raises ValueError if there is nothing to
    compare.
    """
    tokens = min(len(expected), len(measured))
    if tokens == 0:
        raise ValueError("no logprobs to compare")
    distance = np.abs(expected[:tokens].astype(np.float64) - measured[:tokens])
    ordered = np.sort(np.nan_to_num(distance, nan=np.inf))
    common = ordered[-1 - tokens // TOKENS_PER_OUTLIER]
    return Mismatch(float(ordered[-1]), tokens, float(ordered.mean()), float(common))
