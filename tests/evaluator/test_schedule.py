from __future__ import annotations

from streamrl.evaluator.schedule import due, missed


def test_every_nth_in_order():
    announced = [3, 0, 1, 2, 4, 5]
    assert due(announced, 2, {}, announced) == 0
    assert due(announced, 2, {0: None}, announced) == 2
    assert due(announced, 2, {0: None, 2: None, 4: None}, announced) is None
    assert due([], 2, {}, []) is None and due(announced, 0, {}, announced) is None


def test_what_is_deleted_is_passed_over_and_said():
    assert due([0, 2, 4], 2, {}, [4]) == 4
    assert missed([0, 1, 2, 4], 2, {0: None}, [4]) == [2] and missed([0, 2], 0, {}, []) == []
