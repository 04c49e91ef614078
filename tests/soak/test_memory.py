from __future__ import annotations

import numpy as np
import pytest

from tests.soak.memory import Sample, cores, memory, slope


def samples(
    sizes: list[float], process: str = "buffer", pid: int = 1, start_s: float = 0.0
) -> list[Sample]:
    """One a minute."""
    return [
        Sample(start_s + 60 * i, process, pid, size, 30.0 * (i + 1)) for i, size in enumerate(sizes)
    ]


def test_the_slope_is_the_median_of_all_pairs():
    """Slopes 2, 3, 2, 4, 2, 0: their median is 2, and one value that is off moves it little."""
    assert slope(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 2.0, 6.0, 6.0])) == 2.0
    assert slope(np.arange(9.0), np.array([0, 1, 2, 3, 400, 5, 6, 7, 8.0])) == 1.0


def test_what_grows_by_a_mib_a_minute_is_not_flat():
    found = memory(samples([100.0 + i for i in range(31)]), "buffer", 0.0)
    assert (found.slope_mib_per_h, found.growth_mib, found.flat) == (
        pytest.approx(60.0),
        pytest.approx(30.0),
        False,
    )
    assert memory(samples([100.0, 103.0] * 15), "buffer", 0.0).flat


def test_what_was_before_and_earlier_lives_do_not_count():
    grown = samples([10.0, 50.0, 90.0]) + samples([90.0] * 5, start_s=180.0)
    assert memory(grown, "buffer", 180.0).growth_mib == 0.0
    restarted = samples([10.0, 50.0]) + samples([20.0, 20.0], pid=2, start_s=120.0)
    assert memory(restarted, "buffer", 0.0)[:4] == ("buffer", 2, 20.0, 20.0)


def test_one_sample_says_nothing():
    with pytest.raises(ValueError, match="buffer: 1 samples"):
        memory(samples([10.0]), "buffer", 0.0)


def test_cores_count_every_life():
    """Half a core each; one of them lived for a minute of the two, after which another took its
    place.
    """
    assert cores(
        [*samples([1.0, 1.0, 1.0]), *samples([1.0, 1.0], "b", 2), *samples([1.0], "b", 3, 120.0)]
    ) == pytest.approx((90 + 60 + 30) / 120)
