"""Computes the logprobs of a batch under the reference and the teacher, as the learner does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from streamrl.config.run_file import RunFile
from streamrl.learner.initial import initial_model_dir
from streamrl.learner.loss.masking import mask_untrainable
from streamrl.learner.model import model
from streamrl.learner.model.examples import expand, to_ragged
from streamrl.learner.model.experts import without_experts
from streamrl.learner.parallel.mesh import prepare_process
from streamrl.learner.reference import EXTERNAL, NO_REFERENCE, TEACHER, ReferenceModel
from streamrl.learner.update import Updater
from streamrl.stream.records import Batch, Scores
from streamrl.stream.records.compact import wide_logprobs
from streamrl.system import hub
from streamrl.system.errors import ModelError

logger = logging.getLogger(__name__)


class BatchLogprobs(NamedTuple):
    """The logprobs of a batch under one model."""

    logprobs: np.ndarray  # (sampled tokens,) float32
    not_finite: int  # the number of tokens whose logprob was not finite


class ScoringModels(NamedTuple):
    """The models under which the pool scores each batch. At least one is set."""

    reference: ReferenceModel | None
    teacher: ReferenceModel | None


def open_models(run: RunFile) -> ScoringModels:
    """The models that the run's learner asks for. The teacher is in memory; the reference is loaded
    by `ensure_reference`. Raises ModelError and HubError.
    """
    tokenizer_ids = model.vocab_size(initial_model_dir(run))
    reference = ReferenceModel(run, tokenizer_ids) if run.learner.pool_scores_reference else None
    if not run.learner.teacher:
        return ScoringModels(reference, None)
    teacher = ReferenceModel(run, tokenizer_ids, setting=TEACHER)
    teacher.load(EXTERNAL, hub.model_directory(run.learner.teacher, TEACHER))
    return ScoringModels(reference, teacher)


@contextmanager
def open_updater(run: RunFile) -> Iterator[Updater]:
    """An Updater that can compute logprobs within the block: the mesh of its devices is set."""
    prepare_process(run)
    updater = Updater(run.learner, run.batcher.rows, run.batcher.max_seq_len)
    with updater.use_mesh():
        yield updater


def score_all(
    updater: Updater, models: ScoringModels, batch: Batch, scorer: str
) -> tuple[Scores, int]:
    """The scores of a batch under all models, and how many logprobs were not finite."""
    results = [score(updater, one, batch) if one else None for one in models]
    reference, teacher = results
    version = models.reference.version if models.reference else NO_REFERENCE
    assert version is not None, "loaded before"
    count = len(batch.policy_logprobs)
    scores = Scores(
        number=batch.number,
        scorer=scorer,
        reference=version,
        logprobs=reference.logprobs if reference else np.zeros(count, np.float32),
        teacher_logprobs=teacher.logprobs if teacher else None,
    )
    return scores, sum(one.not_finite for one in results if one)


def score(updater: Updater, reference: ReferenceModel, batch: Batch) -> BatchLogprobs:
    """The logprobs of the batch's tokens under the reference. Raises ModelError if they are finite
    for no token.

    Sequences that cannot be trained on are masked, as the learner masks them. A token whose logprob
    is not finite gets that of the policy that sampled it, so its divergence is 0. A batch that does
    not fit its rows gets 0 throughout, because the learner does not train on it.
    """
    try:
        known, masked = mask_untrainable(batch, reference.model.Vocab.size)
    except ValueError as error:
        logger.warning("nothing is scored: %s", error)
        return BatchLogprobs(np.zeros(len(batch.policy_logprobs), np.float32), 0)
    example = expand(without_experts(known), masked)
    logprobs = to_ragged(known, updater.scores(reference.model, example))
    finite = np.isfinite(logprobs)
    if len(logprobs) and not finite.any():
        raise ModelError(
            f"batch {batch.number}: logprobs under the {reference.role}"
            f" (version {reference.version}) are not finite; look at its weights"
        )
    known_logprobs = np.where(finite, logprobs, wide_logprobs(batch.policy_logprobs))
    return BatchLogprobs(known_logprobs, int((~finite).sum()))


def to_metrics(
    batch: Batch, version: int, idle_s: float, score_s: float, not_finite: int
) -> dict[str, float]:
    """The metrics of a batch, by the names in `metric_names.py`. `version`: that of the reference;
    `idle_s`: how long the worker waited for the batch; `score_s`: how long scoring took;
    `not_finite`: the number of logprobs that were not.
    """
    tokens: Any = batch.sequence_lengths.sum()
    values = {
        "idle_s": idle_s,
        "score_s": score_s,
        "tokens_per_s": float(tokens) / score_s,
        "reference_version": float(version),
        "not_finite_tokens": float(not_finite),
    }
    return {f"scorer/{name}": value for name, value in values.items()}
