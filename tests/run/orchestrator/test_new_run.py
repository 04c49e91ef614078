"""Every template is a run file that works, with the files that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.cli.run import TEMPLATE_NAMES
from streamrl.config.run_file import load
from streamrl.envs.catalog import make_env
from streamrl.run.orchestrator import new_run
from streamrl.system.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_the_command_offers_every_template():
    assert sorted(TEMPLATE_NAMES) == new_run.names()


@pytest.mark.parametrize("template", TEMPLATE_NAMES)
def test_a_template_gives_a_run_file_that_loads(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_file, *others = new_run.write(template, "my-run", Path())
    run = load(run_file)
    assert run.run == "my-run" and run_file.name == "my-run.yaml"
    assert all("{name}" not in path.read_text() for path in (run_file, *others))
    for path in others:
        assert str(path) in run_file.read_text(), f"{path} belongs to nothing"


@pytest.mark.parametrize("template", ["quickstart", "dataset", "env"])
def test_the_envs_of_a_template_pose_problems(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = load(new_run.write(template, "mine", Path())[0])
    for name, env in run.envs.items():
        made = make_env(env.kind or name, env.seed, env.params, f"envs.{name}")
        assert made.problem(0).messages


@pytest.mark.parametrize(
    ("template", "written", "source"),
    [
        ("quickstart", "quickstart.yaml", "deploy/runs/quickstart.yaml"),
        ("gsm8k", "gsm8k.yaml", "deploy/runs/gsm8k-1gpu.yaml"),
        ("env", "env_env.py", "examples/reverse_digits.py"),
    ],
)
def test_a_template_under_its_own_name_is_the_file_of_the_repository(
    template: str, written: str, source: str, tmp_path: Path
):
    new_run.write(template, template, tmp_path)
    assert (tmp_path / written).read_text() == (ROOT / source).read_text()


def test_a_file_that_exists_is_kept_and_nothing_is_written(tmp_path: Path):
    (tmp_path / "mine_env.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine_env.py exists; choose another name"):
        new_run.write("env", "mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine_env.py"]
    assert (tmp_path / "mine_env.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["My Run", "../up", "", "a/b"])
def test_a_name_that_no_run_can_have_is_refused(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a name of lowercase letters"):
        new_run.write("env", name, tmp_path)
