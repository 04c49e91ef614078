import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from streamrl.cli import cli
from streamrl.cli.group import RunName
from streamrl.errors import BrokerUnreachable
from tests.support.waiting import patience

RUN = "run: r\nenvs: {copy-digits: {}}\n"


@pytest.fixture
def run_file(tmp_path: Path, run_name: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"run: {run_name}\nenvs: {{copy-digits: {{}}}}\nruns_dir: {tmp_path / 'runs'}\n"
    )
    return path


def streamrl(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamrl.cli", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(120),
        env={**os.environ, **environment},
    )


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from streamrl.cli import cli; cli(['--help'], standalone_mode=False);"
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
    failed = streamrl("buffer", path)
    assert failed.returncode == 2 and failed.stdout == ""
    assert (
        failed.stderr.startswith(f"streamrl: {path}: ")
        and expected in failed.stderr
        and failed.stderr.count("\n") == 1
    )


def test_a_run_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "run.yaml").write_text(RUN)
    result = CliRunner().invoke(cli, ["status", "nosuch"])
    assert (
        result.exit_code == 2
        and "nosuch: neither a run file nor a run in runs/ (there: other)" in result.stderr
    )
    result = CliRunner().invoke(cli, ["status", "missing.yaml"])
    assert result.exit_code == 2 and "missing.yaml: cannot be read" in result.stderr


def test_no_broker_is_one_line_and_debug_shows_where(run_file: Path):
    failed = streamrl("buffer", run_file)
    assert failed.returncode == BrokerUnreachable.exit_code
    assert (
        failed.stderr.startswith("streamrl: no broker is running for run 't")
        and failed.stderr.count("\n") == 1
    )
    assert "Traceback" in streamrl("--debug", "buffer", run_file).stderr


def test_the_run_needs_that_env(run_file: Path, broker: str):
    assert streamrl("topics", "apply", run_file, STREAMRL_KAFKA=broker).returncode == 0
    failed = streamrl("env", run_file, "nosuch", STREAMRL_KAFKA=broker)
    assert failed.returncode == 2
    assert "nosuch" in failed.stderr
    assert "copy-digits" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_missing_topics_are_one_line(run_file: Path, broker: str):
    failed = streamrl("batcher", run_file, STREAMRL_KAFKA=broker)
    assert failed.returncode == 4 and "streamrl topics apply" in failed.stderr


def test_topics_are_made_once_and_a_part_leaves_when_asked(
    run_file: Path, broker: str, run_name: str
):
    assert streamrl("topics", "diff", run_file, STREAMRL_KAFKA=broker).returncode == 1
    assert (
        f"+ {run_name}.batches"
        in streamrl("topics", "apply", run_file, STREAMRL_KAFKA=broker).stdout
    )
    assert (
        streamrl("topics", "apply", run_file, STREAMRL_KAFKA=broker).stdout == "nothing to change\n"
    )
    for sent, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)):
        part = subprocess.Popen(
            [sys.executable, "-m", "streamrl.cli", "buffer", run_file],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STREAMRL_KAFKA": broker},
        )
        assert part.stderr is not None
        while "ready" not in part.stderr.readline():
            assert part.poll() is None
        part.send_signal(sent)
        assert part.wait(patience(20)) == code


def test_unexpected_errors_are_one_line_with_their_place(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr("streamrl.cli.run.load_run", fail)
    result = CliRunner().invoke(cli, ["status", "r"])
    assert result.exit_code == 1
    assert (
        result.stderr.startswith("streamrl: unexpected KeyError: 'gone' (in fail, test_cli.py:")
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "r", "--from", "3"], "--from needs --weights"),
        (["fork", "r", "--as", "x"], "Missing option '--at'"),
        (
            ["fork", "r", "--at", "3", "--as", "x", "--rollouts", "--rewards", "a@1"],
            "--rewards takes all rollouts along",
        ),
        (["rescore", "r"], "Missing option '--reward'"),
        (["fork", "r", "--at", "3"], "Missing option '--as'"),
    ],
)
def test_options_that_need_each_other(arguments: list[str], says: str):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str):
    shown = CliRunner().invoke(cli, ["completion", shell])
    assert shown.exit_code == 0 and "_STREAMRL_COMPLETE" in shown.stdout


def test_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.yaml").write_text(RUN)
    context = click.Context(cli)
    items = RunName().shell_complete(context, click.Argument(["run"]), "f")
    assert [(item.value, item.type) for item in items] == [("first", "plain"), ("f", "file")]


def test_an_unknown_log_level_is_refused(run_file: Path):
    failed = streamrl("buffer", run_file, STREAMRL_LOG="loud")
    assert failed.returncode == 2 and "STREAMRL_LOG is 'LOUD'" in failed.stderr
