"""A tiny model for tests, made once, and what JAX traced, kept for the next test."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.sections.learner import TinyModel
from streamrl.learner import trainer
from streamrl.learner.initial import write_tiny
from tests.learner.updaters import shared_updater

TINY = TinyModel(layers=2, hidden=32, head_dim=16, seed=1)
CONTEXT = 32  # tokens


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners in tests use the Updaters of earlier ones."""
    monkeypatch.setattr(trainer, "Updater", shared_updater)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a two-layer Llama of 16 tokens in Hugging Face layout; not to be written to."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny", TINY, CONTEXT)
