from __future__ import annotations

from streamrl.extensions.evaluator.schedule import EvalSchedule


def test_every_nth_in_order():
    announced = [3, 0, 1, 2, 4, 5]
    schedule = EvalSchedule(every=2, done={})
    found: list[int] = []
    while schedule.is_due(announced):
        due = schedule.next(announced, stored=announced)
        assert due is not None
        found.append(due)
        schedule.on_evaluated(due)
    assert found == [0, 2, 4] and schedule.next(announced, announced) is None
    assert not EvalSchedule(2, {}).is_due([]) and not EvalSchedule(0, {}).is_due(announced)


def test_what_is_deleted_is_passed_over_and_said():
    schedule = EvalSchedule(every=2, done={0: None})
    assert schedule.next([0, 1, 2, 4], stored=[4]) == 4
    assert schedule.skip_deleted([0, 1, 2, 4], stored=[4]) == [2]
    assert schedule.skip_deleted([0, 1, 2, 4], stored=[4]) == []
    assert EvalSchedule(0, {}).skip_deleted([0, 2], stored=[]) == []
