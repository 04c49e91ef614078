import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.cli.group import RunName
from streamrl.system.errors import BrokerUnreachable
from tests.support.command import streamrl

RUN = "run: r\nenvs: {copy-digits: {}}\n"


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from streamrl.cli.command import cli; cli(['--help'], standalone_mode=False);"
        " print(*sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert not {"pydantic", "confluent_kafka", "numpy", "rich", "jax", "yaml"} & set(
        shown.splitlines()[-1].split()
    )
    assert all(
        name in shown
        for name in (
            "up",
            "broker",
            "topics",
            "env",
            "buffer",
            "batcher",
            "scorer",
            "learner",
            "inference",
            "orchestrator",
            "status",
            "completion",
        )
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "run: r\nenvs: {copy: {}}\nbatcher: {total_token_bugdet: 5}",
            "unknown key 'batcher.total_token_bugdet'; did you mean 'total_token_budget'?",
        ),
        ("run: [", "not YAML"),
        ("run: Bad_Name\nenvs: {copy: {}}", "'Bad_Name' is not a name"),
    ],
)
def test_a_bad_run_file_is_one_line_that_names_the_key(tmp_path: Path, text: str, expected: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    failed = CliRunner().invoke(cli, ["topics", "plan", str(path)])
    assert failed.exit_code == 2 and failed.stdout == ""
    assert (
        failed.stderr.startswith(f"streamrl: {path}: ")
        and expected in failed.stderr
        and failed.stderr.count("\n") == 1
    )


def test_no_broker_is_one_line_and_debug_shows_where(run_file: Path):
    failed = streamrl("buffer", run_file)
    assert failed.returncode == BrokerUnreachable.exit_code
    assert (
        failed.stderr.startswith("streamrl: no broker is running for run 't")
        and failed.stderr.count("\n") == 1
    )
    assert "Traceback" in streamrl("--debug", "buffer", run_file).stderr


def test_unexpected_errors_are_one_line_with_their_place(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr("streamrl.cli.run.load_run", fail)
    result = CliRunner().invoke(cli, ["status", "r"])
    assert result.exit_code == 1
    assert (
        result.stderr.startswith("streamrl: unexpected KeyError: 'gone' (in fail, test_group.py:")
        and result.stderr.count("\n") == 1
    )


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "runs/r/report.json")

    monkeypatch.setattr("streamrl.cli.run.load_run", fail)
    result = CliRunner().invoke(cli, ["status", "r"])
    assert (result.exit_code, result.stderr) == (
        1,
        "streamrl: No space left on device: runs/r/report.json\n",
    )


def test_an_interrupted_command(monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamrl.cli.run.load_run", interrupt)
    assert CliRunner().invoke(cli, ["status", "r"]).exit_code == 130


def test_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.yaml").write_text(RUN)
    context = click.Context(cli)
    items = RunName().shell_complete(context, click.Argument(["run"]), "f")
    assert [(item.value, item.type) for item in items] == [("first", "plain"), ("f", "file")]
