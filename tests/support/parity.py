"""The learner's logprobs of whole texts, for tests that hold a server's to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from streamrl.learner.model.examples import RlExample, expand, to_ragged
from streamrl.learner.model.model import load, predict
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.stream.records import Batch

ROWS = 32
CHUNK = 1_024  # tokens of a long row whose logits are in memory at a time


def learner_logprobs(
    directory: Path, sequences: Sequence[np.ndarray], temperature: float, context: int
) -> list[np.ndarray]:
    """Of each sequence's tokens[1:], by the function that the learner trains with.

    A row of `context` tokens a sequence, and ROWS rows every time, so that it compiles once.
    """
    logprobs: list[np.ndarray] = []
    with use_mesh():
        model = load(directory, context)
        for start in range(0, len(sequences), ROWS):
            chunk = sequences[start : start + ROWS]
            predicted = np.asarray(_predict(model, rows_of(chunk, temperature, context)))
            logprobs += [
                row[: len(sequence) - 1] for row, sequence in zip(predicted, chunk, strict=False)
            ]
    return logprobs


def rows_of(sequences: Sequence[np.ndarray], temperature: float, context: int) -> RlExample:
    """Up to ROWS sequences, each alone in its row."""
    shape = (ROWS, context)
    ids = np.zeros(shape, np.int32)
    segments = np.zeros(shape, np.int32)
    zeros = np.zeros(shape, np.float32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
    positions = np.tile(np.arange(context, dtype=np.int32), (ROWS, 1))
    return RlExample(
        input_ids=ids,
        loss_mask=zeros,
        segment_ids=segments,
        position_ids=positions,
        advantages=zeros,
        policy_logprobs=zeros,
        reference_logprobs=zeros,
        temperatures=np.full(shape, temperature, np.float32),
    )


def batch_logprobs(directory: Path, batch: Batch, context: int) -> np.ndarray:
    """The learner's logprobs of the tokens of a batch, by the function that it trains with, row by
    row: (sampled tokens,) float32.
    """
    example = expand(batch)
    with use_mesh():
        model = load(directory, context)
        rows = [
            np.asarray(_predict(model, row_of(example, row), CHUNK))
            for row in range(batch.row_count)
        ]
    return to_ragged(batch, np.concatenate(rows))


def row_of(example: RlExample, row: int) -> RlExample:
    """One row of an example."""
    return jax.tree.map(lambda array: array[row : row + 1], example)


@eqx.filter_jit
def _predict(model: Any, example: RlExample, chunk: int = 0) -> Any:
    return predict(model, example, chunk).logprobs
