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

from streamrl.config.sections.operation import SinkSetting
from streamrl.run.monitoring.sinks import runner
from streamrl.run.monitoring.sinks.base import MetricRecord, SinkContext
from streamrl.run.monitoring.sinks.runner import check, running
from streamrl.system.errors import ConfigError
from tests.run.monitoring.sinks import stories
from tests.support.waiting import until

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
    return stories.context(directory, sinks=sinks)


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


MINE = {"kind": f"{__name__}:Mine"}


def given(context: SinkContext, count: int) -> list[int]:
    """The records that the sink is given in a session that finds `count` records in the topic."""
    with running(context) as sinks:
        sinks.write(enumerate(stories.records(range(9))[:count]))
    return TAKEN[:-1]


def test_a_session_goes_on_behind_the_last_one(tmp_path: Path):
    assert given(made(tmp_path, MINE), 3) == [0, 1, 2]
    assert given(made(tmp_path, MINE), 5) == [3, 4]
    assert given(made(tmp_path, MINE), 5) == []


def test_another_place_is_given_everything(tmp_path: Path):
    given(made(tmp_path, MINE), 3)
    assert given(made(tmp_path, {**MINE, "params": {"fail_at": 99}}), 4) == [0, 1, 2, 3]


def test_a_sink_that_failed_is_given_again_what_it_may_lack(tmp_path: Path):
    failing = {**MINE, "params": {"fail_at": 3}}
    given(made(tmp_path, failing), 2)
    for _ in range(2):
        with running(made(tmp_path, failing)) as sinks:
            sinks.write(enumerate(stories.records(range(9))[:5]))
        assert TAKEN == [2]


def test_after_a_crash_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a sink was given since notes were made before may not have been written."""
    monkeypatch.setattr(runner, "NOTE_AFTER_S", 0.0)
    context = made(tmp_path, MINE)
    notes = tmp_path / "digits" / runner.NOTES
    with running(context) as sinks:
        for record in list(enumerate(stories.records(range(9))))[:5]:
            sinks.write([record])
        until(lambda: list(runner.read_notes(notes).values()) == [3])
        crashed = notes.read_bytes()
    notes.write_bytes(crashed)
    assert given(context, 6) == [4, 5]
    notes.write_bytes(b"{torn")
    assert given(context, 6) == [0, 1, 2, 3, 4, 5]


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

    monkeypatch.delitem(sys.modules, f"streamrl.run.monitoring.sinks.{kind}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=rf"{kind} needs the package {package}.*pip install 'streamrl\[{kind}\]'"
    ):
        check([SinkSetting(kind=kind)])
