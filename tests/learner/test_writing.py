"""Which of a learner's processes writes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.run_file import parse
from streamrl.learner.parallel import distributed
from streamrl.learner.writing import open_publisher, open_writing_part
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.system.errors import Fenced


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    run = parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    return SimpleNamespace(run=run)


def a_log() -> MemoryLog:
    return MemoryLog({"policy-versions": 1, "metrics": 1})


def test_rank_zero_writes_and_is_told_of_a_rival(policy: Any):
    log = a_log()
    with open_writing_part(log, "learner-lead", threading.Event()) as part:
        assert part is not None and part.name == "learner-lead"
        publisher = open_publisher("lead", policy, {}, part)
        assert (publisher.writer, publisher.meter) == (part.writer, part.meter)
        publisher.check_rival()
        RetryingWriter(log, "learner-lead", "policy-versions")
        with pytest.raises(Fenced):
            publisher.check_rival()


def test_the_other_processes_only_train(policy: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "is_rank_zero", lambda: False)
    with open_writing_part(a_log(), "learner-lead", threading.Event()) as part:
        assert part is None
        publisher = open_publisher("lead", policy, {}, part)
        assert publisher.writer is None and publisher.meter is None
        publisher.check_rival()
