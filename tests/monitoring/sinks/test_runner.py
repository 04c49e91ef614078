"""Sinks at work beside the orchestrator: by name, by import path, and what becomes of one that
fails.
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import run_file
from streamrl.errors import ConfigError
from streamrl.monitoring.sinks.base import MetricRecord, SinkContext
from streamrl.monitoring.sinks.runner import check, running
from tests.monitoring.sinks import stories

TAKEN: list[int] = []


class Mine:
    """A sink of a user's own."""

    def __init__(self, context: SinkContext, fail_at: int = -1) -> None:
        self._fail_at = fail_at
        TAKEN.clear()

    def write(self, entries: Sequence[MetricRecord]) -> None:
        for entry in entries:
            if entry.offset == self._fail_at:
                raise OSError("the disk\nis full")
            TAKEN.append(entry.offset)

    def close(self) -> None:
        TAKEN.append(-1)


def made(directory: Path, *sinks: Any) -> SinkContext:
    run = run_file.parse(
        {
            "run": "digits",
            "runs_dir": str(directory),
            "envs": {"copy": {}},
            "orchestrator": {"sinks": list(sinks)},
        }
    )
    return SinkContext(run, print, 0.0)


def told(context: SinkContext) -> None:
    with running(context) as sinks:
        sinks.write(enumerate(stories.records(range(2))))
        sinks.write([])


def test_sinks_by_name_and_by_import_path(tmp_path: Path):
    told(made(tmp_path, "jsonl", {"kind": f"{__name__}:Mine"}))
    count = len(stories.records(range(2)))
    assert [*range(count), -1] == TAKEN
    assert len((tmp_path / "digits" / "metrics.jsonl").read_text().splitlines()) == count


def test_one_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.ERROR):
        told(made(tmp_path, {"kind": f"{__name__}:Mine", "params": {"fail_at": 2}}, "jsonl"))
    assert TAKEN == [0, 1]
    assert len((tmp_path / "digits" / "metrics.jsonl").read_text().splitlines()) == len(
        stories.records(range(2))
    )
    [said] = caplog.messages
    assert "Mine is left out from now on: OSError: the disk is full" in said


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (
            {"kind": "jsonl", "params": {"pth": "x"}},
            "jsonl cannot be opened: TypeError: .*'pth'.*change its params",
        ),
        ({"kind": "nowhere:Sink"}, "'nowhere:Sink' cannot be imported"),
    ],
)
def test_one_that_cannot_be_had_is_one_line_before_the_run(
    sink: dict[str, Any], said: str, tmp_path: Path
):
    with (
        pytest.raises(ConfigError, match=f"orchestrator.sinks: {said}") as raised,
        running(made(tmp_path, sink)),
    ):
        pass
    assert "\n" not in str(raised.value)


def test_an_unknown_name_is_refused_with_the_run_file(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"sinks.*'tensorbord' is not known; did you mean 'tensorboard'"
    ):
        made(tmp_path, "tensorbord")


@pytest.mark.parametrize(
    ("kind", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **named)

    monkeypatch.delitem(sys.modules, f"streamrl.monitoring.sinks.{kind}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=rf"{kind} needs the package {package}.*pip install 'streamrl\[{kind}\]'"
    ):
        check([run_file.Sink(kind=kind)])
