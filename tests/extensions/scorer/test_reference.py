"""Which reference is loaded before a batch is scored, with a stand-in for the model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.scorer import reference as loading
from streamrl.extensions.scorer.reference import ensure_reference
from streamrl.learner.reference import reference_version
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from streamrl.weights.store import Store
from tests.support.data_path import publish


class Model:
    """Notes what is loaded, and what the directory held then."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self.version: int | None = None
        self.loaded: list[tuple[int, str]] = []

    def version_to_load(self, batch: int) -> int | None:
        wanted = reference_version(self._run, batch)
        return None if wanted == self.version else wanted

    def load(self, version: int, directory: Path) -> None:
        self.version = version
        self.loaded.append((version, directory.joinpath("config.json").read_text()))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    first = tmp_path / "first"
    first.mkdir()
    first.joinpath("config.json").write_text("weights 0")
    monkeypatch.setattr(
        loading, "static_reference_dir", lambda run, version: None if version else first
    )
    return parse(
        {
            "run": "small",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
            "learner": {"kl": {"reference": {"by": "pool", "every": 3}}},
        }
    )


def announce(run: RunFile, log: MemoryLog, version: int) -> None:
    stored = Store(f"{run.store}/lead").put(
        version,
        lambda directory: directory.joinpath("config.json").write_text(f"weights {version}"),
    )
    record = PolicyVersion(
        learner="lead",
        version=version,
        uri=stored.uri,
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
    )
    publish(log, Output("policy-versions", "lead", record))


def test_each_reference_is_loaded_once_from_where_it_lies(run: RunFile):
    log = MemoryLog({"policy-versions": 1})
    announce(run, log, 3)
    model: Any = Model(run)
    for number in range(6):
        assert ensure_reference(run, log, model, number, threading.Event())
    assert model.loaded == [(0, "weights 0"), (3, "weights 3")]


def test_a_worker_that_is_to_stop_waits_no_longer_for_a_version(run: RunFile):
    stop = threading.Event()
    stop.set()
    model: Any = Model(run)
    assert not ensure_reference(run, MemoryLog({"policy-versions": 1}), model, 3, stop)
    assert model.loaded == []
