from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from rich.table import Table

from streamrl.cli.command import cli
from streamrl.extensions.advisor import advice, commands, reading
from tests.support.advice import facts, run_of


def test_the_command_reads_the_run_and_prints_the_advice(monkeypatch: pytest.MonkeyPatch):
    asked = list[Any]()

    @contextlib.contextmanager
    def opened(run: str) -> Iterator[tuple[Any, Any]]:
        yield run_of(), f"log of {run}"

    def given(*arguments: Any) -> tuple[str, Table]:
        asked.extend(arguments[1:])
        return "limited by the moon", Table("a column")

    monkeypatch.setattr(commands, "open_recording", opened)
    monkeypatch.setattr(reading, "read_facts", lambda run, log: (facts(), log))
    monkeypatch.setattr(advice, "advise", given)
    result = CliRunner().invoke(cli, ["advise", "small", "--set", "buffer.max_age=2"])
    assert result.exit_code == 0, result.output
    assert asked == [facts(), "log of small", ("buffer.max_age=2",)]
    assert "limited by the moon" in result.output and "a column" in result.output
