"""The learner's tiny model; and what scorers compile is kept as what learners compile."""

from __future__ import annotations

import pytest

from streamrl.extensions.scorer import scoring
from tests.learner.conftest import _traced_once, tiny  # noqa: F401
from tests.learner.updaters import shared_updater


@pytest.fixture(autouse=True)
def _traced_once_for_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "Updater", shared_updater)
