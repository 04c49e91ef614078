from __future__ import annotations

from streamrl.extensions.dashboard.steps import MOST, RECENT, StepCounter, Steps, thinned


def test_a_step_lasts_from_its_version_to_the_next():
    steps = Steps()
    for version, time_s in ((4, 10.0), (5, 20.0), (5, 25.0), (4, 26.0)):
        steps.add(version, time_s)
    assert [steps.at(time_s) for time_s in (9.9, 10.0, 19.9, 20.0, 99.0)] == [-1, 4, 4, 5, 5]
    assert steps.end_s(4) == 20.0 and steps.end_s(5) == float("inf") and steps.end_s(-1) == 10.0


def test_a_count_knows_how_much_it_was():
    counts = StepCounter()
    for step, count in ((0, 2), (3, 1), (3, 1), (1, 5)):  # the last one is late
        counts.add(step, count)
    assert [counts.until(step) for step in (-1, 0, 1, 2, 3, None)] == [0, 2, 7, 7, 9, 9]


def test_older_versions_are_put_together_in_pieces():
    """Of versions 0 to 9 the newest 4 stay; 0 to 5 are six pieces of width 1, three of width 2."""
    assert thinned(range(10), 1, recent=4, older=3) == ([0, 2, 4, 6, 7, 8, 9], 2)
    assert thinned([0, 2, 4, 6, 7, 8, 9, 10, 11], 2, recent=4, older=2) == ([0, 4, 8, 9, 10, 11], 4)
    # 0 and 5, 10 and 15
    assert thinned([0, 5, 10, 15, 20], 1, recent=1, older=2) == ([0, 10, 20], 8)
    assert thinned([3], 1, recent=4, older=3) == ([3], 1) and thinned([], 1) == ([], 1)


def test_how_often_a_run_was_thinned_does_not_matter():
    kept = list[int]()
    width = 1
    for n in range(1, 200):
        kept, width = thinned([*kept, n - 1], width, recent=4, older=4)
        assert (kept, width) == thinned(range(n), 1, recent=4, older=4) and len(kept) <= 8


def test_a_hundred_thousand_steps_take_no_more_memory_than_a_few_thousand():
    """A count and the times of steps, one record a step. What is kept of an old step is exact at
    the end of its piece.
    """
    steps = Steps()
    counts = StepCounter()
    for version in range(100_000):
        if steps.add(version, float(version)):
            counts.regroup(steps)
        counts.add(steps.at(float(version)), 1)
        if version % 1_000 == 0:
            assert len(steps.versions) == len(steps.times_s) <= MOST and len(counts) <= MOST
    assert steps.versions[0] == 0 and steps.versions[-RECENT:] == list(
        range(100_000 - RECENT, 100_000)
    )
    for asked in (0, 1, 777, 50_000, 99_000, 99_999):
        end = steps.end_of(asked)
        assert asked <= end < asked + steps.width and counts.until(end) == end + 1
        assert steps.end_s(end) == (end + 1 if end < 99_999 else float("inf"))
