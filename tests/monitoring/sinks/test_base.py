from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.monitoring.sinks.base import StepSet, WrittenPoints
from tests.monitoring.sinks import stories


@given(st.lists(st.integers(0, 30)))
def test_steps_are_a_set_in_few_stretches(steps: list[int]):
    mine = StepSet()
    plain = set[int]()
    for step in steps:
        assert mine.add(step) == (step not in plain)
        plain.add(step)
    assert [step for first, behind in mine.stretches for step in range(first, behind)] == sorted(
        plain
    )
    assert all(
        behind < after
        for (_, behind), (after, _) in zip(mine.stretches, mine.stretches[1:], strict=False)
    )


def test_a_point_is_new_once():
    told = stories.entries(stories.records(range(4), tries=2))
    had = WrittenPoints()
    points = [
        (name, row.step, value) for row in had.new(told) for name, value in row.values.items()
    ]
    assert stories.only_once(points) == stories.curves(range(4))
    assert had.new(told) == []
