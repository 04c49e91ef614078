"""`streamrl export` and `streamrl import`, and what reads an export, as commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from streamrl.cli.command import cli
from streamrl.extensions.recordings.archive import export
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.parquet import FileLog
from streamrl.system.errors import ExportError
from tests.extensions.recordings.test_archive import everything
from tests.support.data_path import RUN, TOPICS, play


@pytest.fixture(scope="module")
def recording() -> MemoryLog:
    log = MemoryLog(TOPICS)
    play(log)
    return log


@pytest.fixture
def streamrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Its commands in this process: to import them anew takes longer than what they do."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, **environment: str) -> Result:
        runner = CliRunner(env=environment)
        return runner.invoke(cli, [*map(str, arguments)], prog_name="streamrl")

    return run


def test_the_commands(
    streamrl: Callable[..., Result],
    recording: MemoryLog,
    broker: str,
    run_name: str,
    tmp_path: Path,
):
    export(recording, RUN, tmp_path / "x")
    from_files = [streamrl(command, "x") for command in ("replay", "audit")]
    assert [done.exit_code for done in from_files] == [0, 0] and "balanced" in from_files[1].stdout
    assert "40 groups" in from_files[0].stdout and "batches identical" in from_files[0].stdout

    done = streamrl("import", "x", "--as", run_name, STREAMRL_KAFKA=broker)
    assert done.exit_code == 0 and f"run {run_name}: {len(TOPICS)} topics" in done.stdout, (
        done.stderr
    )
    assert [
        streamrl(command, run_name, STREAMRL_KAFKA=broker).stdout for command in ("replay", "audit")
    ] == [d.stdout for d in from_files]
    refused = streamrl("import", "x", "--as", run_name, STREAMRL_KAFKA=broker)
    assert (
        refused.exit_code == 2
        and "take another name with --as" in refused.stderr
        and refused.stderr.count("\n") == 1
    )

    exported = streamrl("export", run_name, "y", STREAMRL_KAFKA=broker)
    assert exported.exit_code == 0 and exported.stdout.endswith("MB in y\n"), exported.stderr
    before = everything(FileLog(tmp_path / "x"))
    assert {
        where: list(messages)
        for where, messages in everything(FileLog(tmp_path / "y")).items()
        if where in before
    } == before
    assert json.loads((tmp_path / "y" / "manifest.json").read_text())["run"] == run_name

    for arguments in (("export", run_name, "y"), ("replay", "runs"), ("audit", tmp_path)):
        failed = streamrl(*arguments, STREAMRL_KAFKA=broker)
        assert (
            failed.exit_code == ExportError.exit_code
            and failed.stderr.count("\n") == 1
            and failed.stderr.startswith("streamrl: ")
        )


def test_a_damaged_export_is_one_line_and_the_name_stays_free(
    streamrl: Callable[..., Result],
    recording: MemoryLog,
    broker: str,
    run_name: str,
    tmp_path: Path,
):
    files = export(recording, RUN, tmp_path / "x")
    path = tmp_path / "x" / files.manifest.topics["rollouts.copy"][0].files[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for arguments in (("replay", "x"), ("audit", "x"), ("import", "x", "--as", run_name)):
        failed = streamrl(*arguments, STREAMRL_KAFKA=broker)
        assert (
            failed.exit_code == ExportError.exit_code
            and failed.stderr.count("\n") == 1
            and "rollouts.copy" in failed.stderr
        )
    path.write_bytes(whole)
    assert streamrl("import", "x", "--as", run_name, STREAMRL_KAFKA=broker).exit_code == 0


def test_an_import_without_a_cluster_gets_a_broker_of_its_own(
    streamrl: Callable[..., Result], recording: MemoryLog, tmp_path: Path
):
    export(
        recording,
        RUN.model_copy(update={"topics": RUN.topics.model_copy(update={"replicas": 3})}),
        tmp_path / "x",
    )
    done = streamrl("import", "x", "--as", "alone")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "runs" / "alone" / "kafka").is_dir()
    assert streamrl("replay", "alone").stdout == streamrl("replay", "x").stdout
