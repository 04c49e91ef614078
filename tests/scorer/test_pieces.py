"""Scores as records, and records as the scores of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.batcher.assemble import assemble
from streamrl.records import Scores
from streamrl.scorer.pieces import Collected, split
from tests.support.build import floats, group

made = assemble([group(sizes=(3, 2))], 7, 7, row_count=2, max_seq_len=8)
assert made is not None
BATCH, LOGPROBS = made, floats(-1, -2, -3, -4, 0)


def test_a_small_batch_is_one_record():
    assert str(split(BATCH, LOGPROBS, "scorer-1", 6)) == str(
        [Scores(number=7, scorer="scorer-1", reference=6, tokens=5, logprobs=LOGPROBS)]
    )


def test_a_large_one_is_several_and_comes_together_again():
    pieces = split(BATCH, LOGPROBS, "scorer-1", 6, limit_tokens=2)
    assert [(piece.start, piece.logprobs.tolist()) for piece in pieces] == [
        (0, [-1, -2]),
        (2, [-3, -4]),
        (4, [0]),
    ]
    collected = Collected()
    for offset, piece in enumerate(reversed(pieces)):
        assert not collected.has(7)
        collected.add(piece, offset)
    assert collected.has(7) and (collected.needed_from, collected.end) == (0, 3)
    np.testing.assert_array_equal(collected.take(7).logprobs, LOGPROBS)
    assert not collected.has(7) and collected.needed_from == 3
    collected.add(pieces[0], 3)  # again
    assert not collected.has(7) and collected.needed_from == 4


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
