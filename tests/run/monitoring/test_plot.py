from __future__ import annotations

import numpy as np

from streamrl.run.monitoring.plot import Curve, drawn_curves, labelled_versions, trailing_mean


def test_trailing_mean():
    np.testing.assert_allclose(trailing_mean([1, 2, 3, 6], 2), [1, 1.5, 2.5, 4.5])
    assert trailing_mean([], 2).shape == (0,)


def test_versions_that_are_named():
    assert labelled_versions(3) == [0, 1, 2, 3]
    assert labelled_versions(142) == [0, 50, 100]
    assert labelled_versions(69) == [0, 10, 20, 30, 40, 50, 60]


def test_twelve_envs_have_a_curve_each_and_more_have_their_mean():
    """A legend of a thousand names took minutes to be laid out."""
    one = Curve([0, 1], [5.0, 6.0], [0.0, 1.0], [0.0, 0.5])
    other = Curve([1, 2], [6.0, 7.0], [0.5, 1.0], [0.5, 0.75])
    few = {f"env-{i}": one for i in range(12)}
    assert drawn_curves(few) == few
    assert drawn_curves({**few, "other": other}) == {
        "mean of 13 envs": Curve(
            [0, 1, 2], [5.0, 6.0, 7.0], [0.0, 12.5 / 13, 1.0], [0.0, 6.25 / 13, (1 + 12.5 / 13) / 3]
        )
    }
