"""Records of `scores`, in any order, as the scores of batches."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.learner.scores import ScoreAssembler
from streamrl.records import Scores
from tests.support.build import floats


def scores(start: int, *values: float) -> Scores:
    return Scores(
        number=7,
        scorer="scorer-1",
        reference=6,
        tokens=5,
        start=start,
        logprobs=floats(*values),
    )


def test_the_scores_of_a_batch_are_one_record():
    assembler = ScoreAssembler()
    assembler.add(scores(0, -1, -2, -3, -4, 0), 10)
    assert assembler.has(7) and (assembler.needed_from, assembler.end) == (10, 11)
    np.testing.assert_array_equal(assembler.take(7).logprobs, floats(-1, -2, -3, -4, 0))


def test_several_records_of_an_earlier_log_come_together_again():
    pieces = [scores(0, -1, -2), scores(2, -3, -4), scores(4, 0)]
    assembler = ScoreAssembler()
    for offset, piece in enumerate(reversed(pieces)):
        assert not assembler.has(7)
        assembler.add(piece, offset)
    assert assembler.has(7) and (assembler.needed_from, assembler.end) == (0, 3)
    np.testing.assert_array_equal(assembler.take(7).logprobs, floats(-1, -2, -3, -4, 0))
    assert not assembler.has(7) and assembler.needed_from == 3
    assembler.add(pieces[0], 3)  # again
    assert not assembler.has(7) and assembler.needed_from == 4


def test_scores_with_too_few_tokens_do_not_stand_before_the_whole():
    assembler = ScoreAssembler()
    for offset, record in enumerate((scores(0, -9, -9, -9), scores(2), scores(4, -9))):
        assembler.add(record, offset)
        assert not assembler.has(7)
    assembler.add(scores(0, -1, -2, -3, -4, 0), 3)
    assert assembler.has(7)
    np.testing.assert_array_equal(assembler.take(7).logprobs, floats(-1, -2, -3, -4, 0))


@pytest.mark.parametrize(
    ("start", "values", "says"),
    [
        (4, [-1, -1], "tokens 4 to 6 of 5"),
        (-1, [-1], "tokens -1 to 0"),
        (0, [np.nan], "is not finite"),
    ],
)
def test_scores_that_cannot_be_are_refused(start: int, values: list[float], says: str):
    with pytest.raises(ValueError, match=says):
        Scores(
            number=7,
            scorer="scorer-0",
            reference=0,
            tokens=5,
            start=start,
            logprobs=floats(*values),
        )
