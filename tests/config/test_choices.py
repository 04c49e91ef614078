from __future__ import annotations

import importlib

import pytest

from streamrl.config import choices
from streamrl.run.monitoring.sinks.runner import NEEDS

TARGETS = [
    *choices.BATCH_NORMALIZERS.values(),
    *choices.ADMISSIONS.values(),
    *choices.CURRICULA.values(),
    *(choice.target for choice in choices.ADVANTAGES.values()),
]


@pytest.mark.parametrize("target", TARGETS)
def test_every_choice_is_a_function(target: str):
    """Those of losses and divergences: tests/learner/loss/test_losses.py. No JAX here."""
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_only_shipped_sinks_need_packages():
    assert NEEDS.keys() <= choices.SINKS.keys()
