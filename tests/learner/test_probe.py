from __future__ import annotations

import numpy as np
import pytest

from streamrl.learner import probe
from streamrl.learner.initial import tiny_tokenizer
from streamrl.learner.model.attention import CUDNN_SEGMENTS, segment_table
from streamrl.stream.records import Batch
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


def test_before_the_first_batch_the_probe_is_a_text() -> None:
    """Of the tiny model's characters it has the digits and signs: 3, 12, 14, 5, 3 * 14 + 12 * 5 =
    42 + 60 = 102, 51 and 153, and then again from the beginning.
    """
    tokenizer = tiny_tokenizer("0123456789+=")
    tokens = probe.text_tokens(tokenizer, 30, len(tokenizer))
    assert tokenizer.decode(tokens.tolist()) == "312145314+125=42+60=1025115331"
    assert len(probe.text_tokens(tokenizer, 12, len(tokenizer))) == 12


def test_a_tokenizer_that_knows_no_word_of_the_text_is_probed_with_random_ids() -> None:
    tokenizer = tiny_tokenizer("äöü")
    tokens = probe.text_tokens(tokenizer, 20, len(tokenizer))
    assert tokens.tolist() == probe.random_tokens(0, 20, len(tokenizer)).tolist()


def test_ids_of_the_text_above_the_limit_are_left_out() -> None:
    tokenizer = tiny_tokenizer("0123456789+=")
    (five,) = tokenizer.encode("5", add_special_tokens=False)
    assert int(probe.text_tokens(tokenizer, 30, five).max()) < five


@pytest.mark.parametrize("length", [64, 2_048, 32_768])
def test_a_long_row_has_no_more_segments_than_the_kernel_of_training_takes(length: int) -> None:
    """So cuDNN computes it. The last copy is the one that is compared, and padding follows."""
    tokens = np.arange(1, 65, dtype=np.uint16)
    row = probe.training_row(tokens, length)
    copies = int(row.segment_ids.max())
    assert copies == min(length // 64, 32)
    _, _, fits = segment_table(row.segment_ids, CUDNN_SEGMENTS)
    assert fits
    last = probe.last_copy(row.input_ids.astype(np.float32), 64)
    assert last.tolist() == list(range(1, 64))
    assert int((row.segment_ids == copies).argmax()) == (copies - 1) * 64


def test_a_row_of_the_training_length_is_full_of_copies() -> None:
    row = probe.training_row(np.array([7, 8, 9], np.uint16), 8)
    assert row.input_ids.tolist() == [[7, 8, 9, 7, 8, 9, 0, 0]]
    assert row.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert row.temperatures.tolist() == [[1] * 8]
    assert probe.last_copy(np.arange(8, dtype=np.float32)[None], 3).tolist() == [3, 4]
