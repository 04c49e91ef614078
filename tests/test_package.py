"""The wheel, installed into an empty environment and used from a directory that knows nothing of
the sources.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import streamrl
from streamrl.cli.group import EXTRAS
from streamrl.cli.run import TEMPLATE_NAMES
from streamrl.extensions.recordings.archive import export
from streamrl.stream.log.memory import MemoryLog
from tests.support.data_path import RUN, TOPICS, play
from tests.support.waiting import patience
from tests.support.wheels import build_wheel, call, install_wheel
from tests.test_layers import LIGHT, room_of_module

ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib, json, pkgutil, streamrl
assert "site-packages" in streamrl.__file__, streamrl.__file__
missing = {}
for found in pkgutil.walk_packages(streamrl.__path__, "streamrl."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        missing[found.name] = error.name
print(json.dumps([len(list(pkgutil.walk_packages(streamrl.__path__, "streamrl."))), missing]))
"""
USES = """
from streamrl.config.run_file import RunFile, load
from streamrl.stream.records import Rollout

run: RunFile = load("run.yaml")
reveal_type(run.learner.learning_rate)
reveal_type(Rollout.turns)
load(5)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel and what it names as the core, in the versions of the lock
    file; and a run file.
    """
    directory = tmp_path_factory.mktemp("empty")
    install_wheel(wheel, directory / "env")
    (directory / "run.yaml").write_text("run: elsewhere\nenvs: {copy-digits: {}}\n")
    return directory


def test_the_wheel_is_typed_licensed_and_versioned(wheel: Path):
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        about = files.read(f"streamrl-{streamrl.__version__}.dist-info/METADATA").decode()
        licence = files.read(f"streamrl-{streamrl.__version__}.dist-info/licenses/LICENSE").decode()
    assert (
        "streamrl/py.typed" in names
        and {f"streamrl/topic_templates/{path.name}" for path in (ROOT / "topics").glob("*.yaml")}
        <= names
        and {f"streamrl/run_templates/{name}/run.yaml" for name in TEMPLATE_NAMES} <= names
    )
    assert licence == (ROOT / "LICENSE").read_text() and "Apache License" in licence
    lines = about.splitlines()
    assert {
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.11",
        "Classifier: Typing :: Typed",
    } <= set(lines)
    # no tests, no docs
    assert not [name for name in names if not name.startswith(("streamrl/", "streamrl-"))]


def test_the_changelog_begins_with_what_becomes_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.*?)\]", text, re.MULTILINE)
    assert headings == ["Unreleased"] and f"becomes {streamrl.__version__}" in text


def test_every_module_of_the_core_is_imported(empty: Path):
    count, missing = json.loads(
        call(empty / "env" / "bin" / "python", "-I", "-c", IMPORT_ALL, cwd=empty)
    )
    light = {name for name in missing if room_of_module(name) in LIGHT}
    # each an extra; the gateway's and the dashboard's have the HTTP server
    sinks = {f"streamrl.run.monitoring.sinks.{name}" for name in ("mlflow", "tensorboard", "wandb")}
    http = {"streamrl.system.http_connection", "streamrl.system.http_server"}
    assert count > 100 and light == {*sinks, *http}
    assert set(missing.values()) <= EXTRAS.keys(), missing
    assert len(missing) < count / 4


def test_what_an_extra_brings_is_named_where_it_is_missing(empty: Path):
    refused = subprocess.run(
        [empty / "env" / "bin" / "streamrl", "learner", "run.yaml"],
        capture_output=True,
        text=True,
        cwd=empty,
    )
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "is not installed: pip install 'streamrl[learner]'" in refused.stderr
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(EXTRAS.values()) <= extras.keys()


def test_the_commands_work_from_elsewhere(empty: Path):
    streamrl_command = empty / "env" / "bin" / "streamrl"
    assert "orchestrator" in call(streamrl_command, "--help", cwd=empty)
    assert streamrl.__version__ in call(streamrl_command, "--version", cwd=empty)
    assert "elsewhere.rollouts.copy-digits  partitions 1" in call(
        streamrl_command, "topics", "plan", "run.yaml", cwd=empty
    )
    assert "kind: KafkaTopic" in call(streamrl_command, "topics", "render", "run.yaml", cwd=empty)
    (empty / "bad.yaml").write_text(
        "run: elsewhere\nenvs: {copy-digits: {}}\nlearner: {los: ppo}\n"
    )
    refused = subprocess.run(
        [streamrl_command, "topics", "plan", "bad.yaml"], capture_output=True, text=True, cwd=empty
    )
    assert refused.returncode == 2 and "did you mean 'loss'" in refused.stderr


def test_where_there_is_no_posix_the_error_says_so(empty: Path):
    """Windows, as far as it can be had here: its missing modules are missing."""
    script = (
        "import sys; sys.modules.update(fcntl=None, resource=None); from streamrl.cli import main;"
        " main()"
    )
    command = (empty / "env" / "bin" / "python", "-c", script)
    assert "Usage" in call(*command, "--help", cwd=empty)
    refused = subprocess.run(
        [*command, "buffer", "run.yaml"], capture_output=True, text=True, cwd=empty
    )
    assert (
        refused.returncode == 1
        and refused.stderr.count("\n") == 1
        and "on Windows, use WSL 2" in refused.stderr
    )


def test_a_recorded_run_is_replayed_and_audited(empty: Path):
    """Buffer and batcher themselves, on the files of a run."""
    log = MemoryLog(TOPICS)
    play(log, 2)
    export(log, RUN, empty / "recording")
    command = empty / "env" / "bin" / "streamrl"
    assert "2 batches identical" in call(command, "replay", "recording", cwd=empty)
    assert "balanced" in call(command, "audit", "recording", cwd=empty)


def test_a_type_checker_sees_the_types(empty: Path):
    (empty / "uses.py").write_text(USES)
    pyright = [
        str(Path(sys.executable).parent / "pyright"),
        "--pythonpath",
        str(empty / "env" / "bin" / "python"),
        "--outputjson",
        "uses.py",
    ]
    said = json.loads(
        subprocess.run(
            pyright, capture_output=True, text=True, timeout=patience(300), cwd=empty
        ).stdout
    )["generalDiagnostics"]
    assert [entry["message"] for entry in said if entry["severity"] == "information"] == [
        'Type of "run.learner.learning_rate" is "float"',
        'Type of "Rollout.turns" is "list[Turn]"',
    ]
    (error,) = [entry for entry in said if entry["severity"] == "error"]
    assert error["range"]["start"]["line"] == 7 and "str | Path" in error["message"]
