import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.run_file import RunFile, load_with_origin, parse
from streamrl.run.orchestrator.run_directory import lock_run_dir, names, resolve_run, stop, with_env
from streamrl.system.errors import ConfigError, StreamrlError


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path / "runs"),
            "envs": {"copy": {}},
            "kafka": {"bootstrap.servers": "a:1"},
        }
    )


def test_the_run_file_is_kept_as_resolved_and_for_its_owner(run: RunFile):
    with lock_run_dir(run) as home:
        kept = home / "run.yaml"
        assert load_with_origin(kept) == (run, True)
        assert kept.stat().st_mode & 0o077 == 0


def test_an_existing_run_is_not_begun_by_accident(run: RunFile):
    with lock_run_dir(run):
        pass
    with pytest.raises(StreamrlError, match="--resume.*--fresh"), lock_run_dir(run):
        pass
    with lock_run_dir(run, resume=True):
        pass
    with (
        pytest.raises(ConfigError, match="exclude each other"),
        lock_run_dir(run, resume=True, fresh=True),
    ):
        pass


def test_there_must_be_something_to_resume(run: RunFile):
    with pytest.raises(StreamrlError, match="no run 'r'"), lock_run_dir(run, resume=True):
        pass


def test_fresh_archives_all_of_it(run: RunFile, tmp_path: Path):
    with lock_run_dir(run) as home:
        (home / "kafka").mkdir()
        (home / "kafka" / "data").write_text("log")
    with lock_run_dir(run, fresh=True) as home:
        assert sorted(path.name for path in home.iterdir()) == [".lock", "run.yaml"]
    [archived] = (tmp_path / "runs" / "archive").iterdir()
    assert archived.name.startswith("r-") and (archived / "kafka" / "data").read_text() == "log"


@pytest.mark.parametrize("how", ["resume", "fresh"])
def test_two_at_once_do_not_get_the_same_run(run: RunFile, how: str):
    script = f"""
from streamrl.config.run_file import parse
from streamrl.run.orchestrator.run_directory import lock_run_dir
with lock_run_dir(parse({run.model_dump()!r}), {how}=True): pass
"""
    with lock_run_dir(run):
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"is in use by process {os.getpid()}" in second.stderr


def test_a_run_is_found_by_an_env_of_it(
    run: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run in runs/ has an env"):
        with_env("copy")
    with lock_run_dir(run):
        pass
    other = parse(
        {
            **run.model_dump(mode="json"),
            "run": "s",
            "envs": {"copy": {}, "quiz": {"kind": "own.py:Quiz"}},
        }
    )
    with lock_run_dir(other):
        pass
    assert with_env("own.py:Quiz") == with_env("quiz") == "s"
    with pytest.raises(
        ConfigError,
        match=(
            "copy: r, s in runs/ has an env of that name or kind; name the run: streamrl env RUN"
            " copy"
        ),
    ):
        with_env("copy")


def test_a_run_is_found_by_file_and_by_name(
    run: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with lock_run_dir(run) as home:
        assert resolve_run("r") == resolve_run(str(home / "run.yaml")) == run
    assert names() == ["r"]
    assert resolve_run("r", ("batcher.lookahead=1",)).batcher.lookahead == 1


def test_a_run_that_was_moved_is_where_its_file_is(run: RunFile, tmp_path: Path):
    with lock_run_dir(run) as home:
        pass
    moved = tmp_path / "elsewhere" / "r"
    moved.parent.mkdir()
    home.rename(moved)
    assert resolve_run(str(moved / "run.yaml")).directory == moved


def test_a_run_of_another_host_is_stopped_there(run: RunFile, monkeypatch: pytest.MonkeyPatch):
    """On a shared file system the number in the lock is that of a process of its host; here it may
    be anybody.
    """
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: signalled.append(pid))
    with lock_run_dir(run) as home, (home / ".lock").open("r+") as held:
        held.truncate(0)
        held.write("4711 elsewhere")
        held.flush()
        with pytest.raises(StreamrlError, match="is run by process 4711 of host elsewhere"):
            stop(run)
    assert signalled == []
