"""A broker's directory that has been used, for tests that start a real one on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.stream.local_kafka import broker
from tests.support.kafka import make_topics


@pytest.fixture(scope="session")
def formatted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's directory after a first, clean life, with the topic `kept` in it."""
    directory = tmp_path_factory.mktemp("formatted")
    (directory / "data.new").mkdir()  # as if formatting had been interrupted once
    first = broker.start(directory)
    try:
        make_topics(first.address, {"kept": 1})
    finally:
        first.stop()
    return directory


@pytest.fixture
def directory(formatted: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it; whatever runs on it in the end is killed."""
    copy = tmp_path / "kafka"
    shutil.copytree(formatted, copy)
    yield copy
    left = broker.find(copy)
    if left:
        left.process.kill()
