"""Records of `scores`, in any order, as the scores of batches."""

from __future__ import annotations

import numpy as np

from streamrl.learner.scores import ScoreAssembler
from streamrl.stream.records import Scores
from tests.support.build import floats


def scores(number: int, *values: float) -> Scores:
    return Scores(number=number, scorer="scorer-1", reference=6, logprobs=floats(*values))


def test_the_scores_of_a_batch_are_taken_once():
    assembler = ScoreAssembler()
    assert not assembler.has(7)
    assembler.add(scores(7, -1, 0), 10)
    assert assembler.has(7)
    np.testing.assert_array_equal(assembler.take(7).logprobs, floats(-1, 0))
    assert not assembler.has(7)
    assembler.add(scores(7, -1, 0), 11)  # again
    assert not assembler.has(7)


def test_the_first_record_of_a_batch_counts():
    assembler = ScoreAssembler()
    assembler.add(scores(7, -1), 0)
    assembler.add(scores(7, -2), 1)
    assert assembler.take(7).logprobs.tolist() == [-1]


def test_the_next_reader_begins_at_the_oldest_scores_that_are_not_taken():
    assembler = ScoreAssembler()
    assert assembler.needed_from == 0
    for offset, number in ((4, 1), (5, 2), (6, 0)):
        assembler.add(scores(number, -1), offset)
    assert assembler.needed_from == 4
    assembler.take(0)
    assert assembler.needed_from == 4
    assembler.take(1)
    assert assembler.needed_from == 5
    assembler.take(2)
    assert assembler.needed_from == 7
