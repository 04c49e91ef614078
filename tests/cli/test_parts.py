from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from tests.support.command import streamrl


def test_the_run_needs_that_env(run_file: Path, broker: str):
    assert streamrl("topics", "apply", run_file, STREAMRL_KAFKA=broker).returncode == 0
    failed = streamrl("env", run_file, "nosuch", STREAMRL_KAFKA=broker)
    assert failed.returncode == 2
    assert "nosuch" in failed.stderr
    assert "copy-digits" in failed.stderr
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str):
    shown = CliRunner().invoke(cli, ["completion", shell])
    assert shown.exit_code == 0 and "_STREAMRL_COMPLETE" in shown.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--index", "1"],
        ["--coordinator", "h:1", "--processes", "2"],
        ["--coordinator", "h:1", "--processes", "2", "--index", "2"],
    ],
)
def test_the_processes_of_a_learner_are_all_told_where_they_stand(options: list[str]):
    result = CliRunner().invoke(cli, ["learner", "r", *options])
    assert result.exit_code == 2 and "belong together" in result.stderr


def test_an_env_that_no_run_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["env", "nosuch"])
    assert result.exit_code == 2 and "nosuch" in result.stderr
