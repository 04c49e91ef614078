"""The scores of a batch, with a stand-in for the reference that says what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.extensions.scorer.scoring import BatchLogprobs, score, to_metrics
from streamrl.learner.model.examples import to_dense
from streamrl.stream.records import Batch
from streamrl.system.errors import ModelError
from tests.learner.test_process import batch

VOCABULARY = 16
REFERENCE: Any = SimpleNamespace(
    model=SimpleNamespace(Vocab=SimpleNamespace(size=VOCABULARY)),
    version=2,
    role="reference",
)


def scored(made: Batch, values: np.ndarray) -> BatchLogprobs:
    """The scores where the reference has these logprobs: (sum of lengths,) float32."""
    updater: Any = SimpleNamespace(scores=lambda model, example: to_dense(made, values))
    return score(updater, REFERENCE, made)


def logprobs(made: Batch) -> np.ndarray:
    return -np.arange(1, len(made.tokens) + 1, dtype=np.float32)


def test_every_token_has_the_logprob_of_the_reference():
    made = batch(1)
    found = scored(made, logprobs(made))
    assert found.logprobs.dtype == np.float32 and found.not_finite == 0
    assert found.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]


def test_a_token_without_a_finite_logprob_gets_that_of_the_policy():
    made = batch(1)
    values = logprobs(made)
    values[3] = np.nan
    found = scored(made, values)
    assert found.not_finite == 1
    assert found.logprobs[3] == made.policy_logprobs[3] and found.logprobs[4] == -5.0


def test_a_reference_that_says_nothing_of_any_token_is_an_error():
    made = batch(1)
    with pytest.raises(ModelError, match=r"batch 1: .* \(version 2\) are not finite"):
        scored(made, np.full(len(made.tokens), np.nan, np.float32))


def test_a_batch_that_does_not_fit_its_rows_is_scored_0():
    made = msgspec.structs.replace(batch(1), max_seq_len=2)
    assert not scored(made, logprobs(batch(1))).logprobs.any()


def test_metrics_count_prompts_once_a_sequence():
    """Three sequences of 3 tokens of prompt each, and 6 sampled tokens, in half a second."""
    assert to_metrics(batch(1), 2, 1.5, 0.5, not_finite=3) == {
        "scorer/idle_s": 1.5,
        "scorer/score_s": 0.5,
        "scorer/tokens_per_s": 30.0,
        "scorer/reference_version": 2.0,
        "scorer/not_finite_tokens": 3.0,
    }
