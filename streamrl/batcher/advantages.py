"""Advantages once more, over a whole batch, where the method needs that: what the buffer made of each group, against all that train with it.

Each function maps `advantages`: (rollouts of the batch,) float32 to the same and is pure. Your own: name it MODULE:FUNCTION in the run file.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from streamrl.imports import import_path
from streamrl.records import Batch

BatchStage = Callable[[np.ndarray], np.ndarray]
SAME = 1e-6  # a standard deviation below it is rounding: there is no scale to divide by


def unchanged(advantages: np.ndarray) -> np.ndarray:
    """As the buffer made them."""
    return advantages


def normalized(advantages: np.ndarray) -> np.ndarray:
    """(A - mean) / std over the rollouts of the batch, the population's. Equal ones give 0. REINFORCE++, arXiv:2501.03262.

    `advantages`: (n,) float32. Returns (n,) float32.
    """
    exact = advantages.astype(np.float64)
    centred = exact - exact.mean() if len(exact) else exact
    scale = float(np.sqrt(np.mean(np.square(centred)))) if len(exact) else 0.0
    return (centred / scale).astype(np.float32) if scale > SAME else np.zeros(len(advantages), np.float32)


STAGES: dict[str, BatchStage] = {"none": unchanged, "normalize": normalized}
STAGE_OF = {"reinforce++": "normalize", "reinforce++-baseline": "normalize"}  # what a shipped buffer.advantage needs; the others: none


def stage_named(name: str) -> BatchStage:
    """The shipped stage of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return STAGES.get(name) or import_path(name, "batcher.advantage", STAGES)


def staged(batch: Batch, stage: BatchStage) -> Batch:
    """The batch with the advantages that the stage makes of its own. Raises ValueError naming the batch when they cannot be used."""
    made = stage(batch.advantages)
    if made.shape != batch.advantages.shape or not np.isfinite(made).all():
        raise ValueError(f"batch {batch.number}: batcher.advantage returned {made!r}, expected {len(batch.uids)} finite numbers")
    return msgspec.structs.replace(batch, advantages=made.astype(np.float32, copy=False))
