import contextlib

import pytest

from streamrl.batcher.assemble import assemble
from streamrl.batcher.parts import Joiner, split
from streamrl.log.codec import encode
from streamrl.records import Batch, BatchPart
from tests.support.build import group


def make() -> Batch:
    batch = assemble([group(sizes=(30, 30))], 7, 0, row_count=1, max_seq_len=64)
    assert batch is not None
    return batch


def test_a_small_batch_is_one_record():
    assert [encode(record) for record in split(make())] == [encode(make())]


def test_a_large_one_is_several_and_comes_back_whole():
    pieces = split(make(), limit_bytes=200)
    joiner = Joiner()
    whole = [joiner.add(piece) for piece in pieces]
    assert len(pieces) > 2 and whole[:-1] == [None] * (len(pieces) - 1)
    last = whole[-1]
    assert last is not None and encode(last) == encode(make())


def test_a_missing_or_altered_piece_is_named():
    pieces = [piece for piece in split(make(), limit_bytes=200) if isinstance(piece, BatchPart)]
    with pytest.raises(ValueError, match=r"batch 7: piece 1 of \d came after 0 pieces"):
        Joiner().add(pieces[1])
    joiner = Joiner()
    altered = BatchPart(number=7, part=0, parts=len(pieces), data=pieces[0].data[::-1])
    with pytest.raises(ValueError, match="digest"):
        [joiner.add(piece) for piece in (altered, *pieces[1:])]


def test_behind_a_batch_that_is_cut_the_next_one_is_whole():
    pieces = [piece for piece in split(make(), limit_bytes=200) if isinstance(piece, BatchPart)]
    for cut in (pieces[2:], pieces[:2]):  # by retention; by whoever wrote it
        joiner, whole = Joiner(), list[Batch]()
        for piece in (*cut, *pieces):
            with contextlib.suppress(ValueError):
                whole += filter(None, [joiner.add(piece)])
        assert [encode(batch) for batch in whole] == [encode(make())]
