from __future__ import annotations

import pytest

from streamrl.stream.log import import_plan
from streamrl.stream.log.import_plan import WriteOp, plan_writes
from streamrl.stream.log.protocol import Message

WHERE = ("fates", 0)


def message(offset: int, value: bytes = b"v") -> Message:
    return Message("fates", b"k", value, partition=0, offset=offset)


def planned(there: list[int], end: int, start: int = 0) -> list[tuple[list[int], int]]:
    """(offsets, gap) of each step for a partition whose readable offsets are `there`."""
    return [
        ([m.offset for m in step.messages], step.gap)
        for step in plan_writes(WHERE, start, end, map(message, there))
    ]


def written(made: list[WriteOp]) -> tuple[list[int], int]:
    """What a broker makes of the steps: the offsets that a reader sees, and the end."""
    seen = list[int]()
    next_offset = 0
    for step in made:
        for _ in step.messages:
            seen.append(next_offset)
            next_offset += 1
        if step.committed:
            next_offset += 1  # the marker
        if placeholders := list(step.placeholders):
            assert [placeholder.offset for placeholder in placeholders] == list(
                range(next_offset, next_offset + len(placeholders))
            )
            next_offset += len(placeholders) + 1
        assert next_offset == step.end
    return seen, next_offset


def test_records_without_holes_are_one_plain_step():
    assert planned([0, 1, 2], 3) == [([0, 1, 2], 0)]
    assert not next(plan_writes(WHERE, 0, 1, [message(0)])).committed


def test_a_hole_of_one_is_the_marker_of_the_transaction_before_it():
    assert planned([0, 1, 3], 5) == [([0, 1], 1), ([3], 1)]


def test_a_larger_hole_is_an_aborted_transaction():
    assert planned([0, 4], 5) == [([0], 3), ([4], 0)]
    first = next(plan_writes(WHERE, 0, 5, [message(0), message(4)]))
    # and a marker at 3
    assert not first.committed and [placeholder.offset for placeholder in first.placeholders] == [
        1,
        2,
    ]


def test_nothing_readable_at_all():
    assert planned([], 0) == []
    assert planned([], 3) == [([], 3)]


def test_what_retention_has_deleted_is_filled():
    assert planned([2, 3], 5, start=2) == [([0, 1, 2, 3], 1)]
    assert planned([], 3, start=2) == [([0, 1], 1)]


def test_a_single_offset_before_everything_cannot_be_made():
    with pytest.raises(ValueError, match=r"fates\[0\] begins with a single offset"):
        planned([1], 2)


def test_chunks_are_bounded_and_the_last_one_closes_the_hole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_plan, "MAX_OP_MESSAGES", 2)
    assert planned([0, 1, 2, 3, 4], 6) == [([0, 1], 0), ([2, 3], 0), ([4], 1)]
    monkeypatch.setattr(import_plan, "MAX_OP_MESSAGES", 99)
    monkeypatch.setattr(import_plan, "MAX_OP_BYTES", 10)
    made = list(plan_writes(WHERE, 0, 3, [message(i, b"x" * 10) for i in range(3)]))
    assert [len(step.messages) for step in made] == [1, 1, 1]


@pytest.mark.parametrize(
    "there", [[0], [0, 2, 4, 6], [0, 1, 2, 7, 8, 10], [2, 3, 9], [0, 2, 3, 4, 8]]
)
def test_every_record_gets_its_offset_back(there: list[int]):
    for end in range(there[-1] + 1, there[-1] + 5):
        assert written(list(plan_writes(WHERE, 0, end, map(message, there)))) == (there, end)
