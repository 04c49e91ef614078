from __future__ import annotations

import numpy as np

from streamrl.run.monitoring.plot import labelled_versions, trailing_mean


def test_trailing_mean():
    np.testing.assert_allclose(trailing_mean([1, 2, 3, 6], 2), [1, 1.5, 2.5, 4.5])
    assert trailing_mean([], 2).shape == (0,)


def test_versions_that_are_named():
    assert labelled_versions(3) == [0, 1, 2, 3]
    assert labelled_versions(142) == [0, 50, 100]
    assert labelled_versions(69) == [0, 10, 20, 30, 40, 50, 60]
