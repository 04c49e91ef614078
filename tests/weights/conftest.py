"""The tiny model of the learner's tests."""

from tests.learner.conftest import compiled, tiny

__all__ = ["compiled", "tiny"]
