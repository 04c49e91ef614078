from __future__ import annotations

import numpy as np

from streamrl.learner import probe
from streamrl.records import Batch
from tests.support.batcher import CONFIG, arrivals, step_once
from tests.support.build import version_event


def batch() -> Batch:
    """Two groups of two rollouts, each a prompt 1, 2 and the tokens 10, 11, 12 or 13, 14, 15."""
    out = step_once([version_event(0), *arrivals("a", "b")], CONFIG)
    (found,) = [o.record for o in out if isinstance(o.record, Batch)]
    return found


def test_real_tokens_are_those_of_a_sequence_that_is_drawn_and_of_the_next_ones() -> None:
    found = {tuple(probe.batch_tokens(batch(), seed, 7, 100).tolist()) for seed in range(8)}
    assert found == {(1, 2, 10, 11, 12, 1, 2), (1, 2, 13, 14, 15, 1, 2)}
    assert len(probe.batch_tokens(batch(), 0, 1_000, 100)) == 20  # as many as the batch has


def test_ids_that_the_tokenizer_does_not_know_are_left_out() -> None:
    assert set(probe.batch_tokens(batch(), 0, 100, 13).tolist()) == {1, 2, 10, 11, 12}
    assert probe.random_tokens(3, 50, 13).max() < 13


def test_a_row_of_the_training_length_is_full_of_copies() -> None:
    row = probe.training_row(np.array([7, 8, 9], np.uint16), 8)
    assert row.input_ids.tolist() == [[7, 8, 9, 7, 8, 9, 0, 0]]
    assert row.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert row.temperatures.tolist() == [[1] * 8]
    assert probe.last_copy(np.arange(8, dtype=np.float32)[None], 3).tolist() == [3, 4]
