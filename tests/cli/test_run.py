from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.run.orchestrator import whole_run
from tests.support.hub import serving_hub, use_hub


def test_a_run_that_is_not_up_cannot_be_stopped(run_file: Path):
    result = CliRunner().invoke(cli, ["down", str(run_file)])
    assert result.exit_code != 0 and result.stderr.count("\n") == 1


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_verdict_is_the_exit_code(
    code: int, run_file: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[object] = []

    def up(run: object, stop: object, *choices: object) -> int:
        asked.extend(choices[:2])
        return code

    monkeypatch.setattr(whole_run, "up", up)
    result = CliRunner().invoke(cli, ["up", str(run_file), "--resume"])
    assert (result.exit_code, asked) == (code, [True, False])


def test_fetch_prints_the_commits_that_a_run_file_may_name(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving_hub() as hub:
        use_hub(monkeypatch, hub.url, str(tmp_path / "cache"))
        commit = hub.model("me/policy", {"config.json": b"{}", "model.safetensors": b"weights"})
        result = CliRunner().invoke(
            cli, ["fetch", str(run_file), "--set", "model.path=me/policy"], catch_exceptions=False
        )
    assert result.exit_code == 0
    where = f"{tmp_path}/cache/models--me--policy/snapshots/{commit}"
    assert result.stdout == f"me/policy@{commit} in {where}\n"


def test_a_part_by_hand_needs_the_commit_of_a_model_on_the_hub(run_file: Path):
    run_file.write_text(run_file.read_text() + "model: {path: me/policy}\n")
    for command in ("learner", "orchestrator"):
        result = CliRunner().invoke(cli, [command, str(run_file)])
        assert result.exit_code == 2 and "run `streamrl fetch RUN.yaml`" in result.stderr


def test_a_new_run_file_is_checked_without_starting_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli, ["new", "demo", "--template", "env"], catch_exceptions=False)
    assert made.exit_code == 0
    assert made.stdout.splitlines() == [
        "demo.yaml",
        "demo_env.py",
        "next: streamrl check demo.yaml; streamrl up demo.yaml",
        "other templates (--template): quickstart, dataset, agent, gsm8k",
    ]
    told = CliRunner().invoke(cli, ["check", "demo.yaml"], catch_exceptions=False)
    assert told.exit_code == 0 and "learner, inference-0, buffer, batcher" in told.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.yaml", "demo_env.py"]


def test_what_is_wrong_with_a_run_file_is_one_line(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("run: r\nenvs: {copy-digits: {}}\nbufer: {}\n")
    told = CliRunner().invoke(cli, ["check", str(tmp_path / "r.yaml")])
    assert told.exit_code == 2 and told.stdout == ""
    assert "unknown key 'bufer'" in told.stderr and told.stderr.count("\n") == 1
