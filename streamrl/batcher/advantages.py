"""Advantages once more, over a whole batch, where the method needs that: what the buffer made of
each group, against all that train with it.

Each function is pure and maps `values`, value by value, by what it finds `over` the batch:
(rollouts,) float32, one advantage each. It is called for the rollouts themselves, and for their
tokens where these have advantages of their own, so that both stay on one scale. Your own: name it
MODULE:FUNCTION in the run file.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from streamrl.batcher.assemble import heads
from streamrl.config.choices import NORMALIZED_ADVANTAGES
from streamrl.config.plugins import import_path
from streamrl.records import Batch

BatchStage = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (values, over)
SAME = 1e-6  # a difference below it is rounding


def unchanged(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    """As the buffer made them."""
    return values


def normalized(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    """(A - mean) / std, both over the rollouts of the batch, std the population's. REINFORCE++,
    arXiv:2501.03262.

    `values`: (m,) float32, `over`: (n,) float32. Returns (m,) float32. Where all rollouts are equal
    there is no scale to divide by, and they are 0.
    """
    if not len(over):
        return np.zeros(len(values), np.float32)
    exact = over.astype(np.float64)
    scale = float(exact.std())
    centred = values.astype(np.float64) - exact.mean()
    return (
        centred / scale if scale > SAME else np.where(np.abs(centred) > SAME, centred, 0.0)
    ).astype(np.float32)


STAGES: dict[str, BatchStage] = {"none": unchanged, "normalize": normalized}
# what a shipped buffer.advantage needs; the others: none
STAGE_OF = dict.fromkeys(NORMALIZED_ADVANTAGES, "normalize")


def stage_named(name: str) -> BatchStage:
    """The shipped stage of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return STAGES.get(name) or import_path(name, "batcher.advantage", STAGES)


def staged(batch: Batch, stage: BatchStage) -> Batch:
    """The batch with what the stage makes of its advantages, its tokens' included. Raises
    ValueError naming the batch when that cannot be used.
    """
    over = batch.advantages[heads(batch.uids)]  # a rollout that forked is one rollout
    changes = {"advantages": _made(batch, stage, batch.advantages, over)}
    if batch.token_advantages is not None:
        # what was not sampled has none, and is to have none
        sampled = slice(None) if batch.loss_mask is None else batch.loss_mask > 0
        changes["token_advantages"] = batch.token_advantages.copy()
        changes["token_advantages"][sampled] = _made(
            batch, stage, batch.token_advantages[sampled], over
        )
    return msgspec.structs.replace(batch, **changes)


def _made(batch: Batch, stage: BatchStage, values: np.ndarray, over: np.ndarray) -> np.ndarray:
    made = stage(values, over)
    if made.shape != values.shape or not np.isfinite(made).all():
        raise ValueError(
            f"batch {batch.number}: batcher.advantage returned {made!r}, expected {len(values)} finite numbers"
        )
    return made.astype(np.float32, copy=False)
