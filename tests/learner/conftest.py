"""A tiny model for tests, made once; JAX's compiled programs, kept in the working tree, and what it
traced, kept for the next test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.sections.learner import TinyModel
from streamrl.learner import trainer
from streamrl.learner.initial import write_tiny
from streamrl.learner.parallel import mesh
from streamrl.learner.parallel.mesh import enable_compilation_cache
from tests.conftest import COMPILED
from tests.learner.updaters import shared_updater

TINY = TinyModel(layers=2, hidden=32, head_dim=16, seed=1)
CONTEXT = 32  # tokens


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Pytest's plugins have imported JAX before its variable was set."""
    enable_compilation_cache(COMPILED)


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners in tests use that of the working tree (tests/conftest.py), not one for every run,
    and the Updaters of earlier ones.
    """
    monkeypatch.setattr(mesh, "enable_compilation_cache", lambda directory: None)
    monkeypatch.setattr(trainer, "Updater", shared_updater)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a two-layer Llama of 16 tokens in Hugging Face layout; not to be written to."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny", TINY, CONTEXT)
