from __future__ import annotations

import numpy as np
import pytest

from streamrl.extensions.dashboard import panels
from tests.extensions.dashboard.made import folded, messages


def test_curves_belong_to_their_batch():
    state = folded(messages())
    reward, *_ = panels.panels(state)
    assert reward["series"][0]["points"] == [[0, 0.0], [1, 0.25], [2, 0.5]]
    assert panels.panels(state, 1)[0]["series"][0]["points"] == [[0, 0.0], [1, 0.25]]
    loss = next(panel for panel in panels.panels(state) if panel["title"] == "Loss")
    assert loss["series"] == [{"name": "loss", "points": [[0, 1.0], [1, 0.75], [2, 0.5]]}]


def test_a_long_curve_is_thinned_to_means(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(panels, "POINTS", 2)
    assert panels.thinned([0, 1, 2, 3, 4], np.array([1.0, 3.0, np.nan, 8.0, np.nan])) == [
        [2, 2.0],
        [4, 8.0],
    ]
    assert (
        panels.thinned([7], np.array([np.inf])) == [[7, None]]
        and panels.thinned([], np.array([])) == []
    )
