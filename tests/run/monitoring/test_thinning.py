from __future__ import annotations

import pytest

from streamrl.run.monitoring.thinning import Thinned


def test_points_are_kept_at_equal_distances_and_the_newest_among_them():
    thinned = Thinned[int](4)
    seen = list[list[int]]()
    for point in range(10):
        thinned.add(point)
        seen.append(thinned.points())
    assert seen[3] == [0, 1, 2, 3] and seen[4] == [0, 2, 4] and seen[5] == [0, 2, 4, 5]
    assert seen[8] == [0, 4, 8] and seen[9] == [0, 4, 8, 9]
    with pytest.raises(ValueError, match="most is 1; it must be at least 2"):
        Thinned[int](1)
