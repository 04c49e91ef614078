"""Errors that a user meets, from the command line on: one line that says what, where and what to
do, an exit code, no traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamrl.config.run_file import load
from streamrl.stream.log.kafka import topic_changes
from streamrl.system.errors import (
    BrokerUnreachable,
    ConfigError,
    ModelError,
    TopicMissing,
    describe_error,
)
from tests.support.waiting import patience

ENVS = {"copy-digits": {"fraction": 0.5}, "mine": {"kind": "nowhere.py:Mine"}}


def run_file(directory: Path, name: str, **sections: object) -> Path:
    path = directory / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": name,
                "runs_dir": str(directory / "runs"),
                "envs": ENVS,
                "model": {"max_seq_len": 64},
                **sections,
            }
        )
    )
    return path


def fails(*arguments: object, kafka: str = "", timeout_s: float = 90) -> tuple[int, str]:
    """(exit code, the one line on stderr)"""
    environment = {
        **os.environ,
        "STREAMRL_LOG": "ERROR",
        **({"STREAMRL_KAFKA": kafka} if kafka else {}),
    }
    command = [sys.executable, "-m", "streamrl.cli", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=patience(timeout_s)
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("streamrl: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return done.returncode, lines[0]


def test_no_broker(tmp_path: Path):
    code, line = fails("buffer", run_file(tmp_path, "alone"))
    assert code == BrokerUnreachable.exit_code and "streamrl broker" in line


def test_a_wrong_address(tmp_path: Path):
    code, line = fails("buffer", run_file(tmp_path, "astray"), kafka="127.0.0.1:9")
    assert (
        code == BrokerUnreachable.exit_code and "127.0.0.1:9" in line and "STREAMRL_KAFKA" in line
    )


def test_a_missing_topic(tmp_path: Path, broker: str, run_name: str):
    path = run_file(tmp_path, run_name)
    code, line = fails("batcher", path, kafka=broker)
    assert code == TopicMissing.exit_code and "streamrl topics apply" in line

    run = load(path)
    settings: dict[str, str | int | float | bool] = {"bootstrap.servers": broker}
    topic_changes.apply(run, settings)
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(settings)
    for future in admin.delete_topics([f"{run_name}.groups.mine"]).values():
        future.result(patience(20))
    code, line = fails("batcher", path, kafka=broker)
    assert (
        code == TopicMissing.exit_code and "groups.mine" in line and "streamrl topics apply" in line
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("copy-digit", "the run has no env 'copy-digit'; it has copy-digits, mine"),
        ("mine", "'nowhere.py:Mine' cannot be loaded"),
    ],
)
def test_an_env_that_is_not_found(tmp_path: Path, broker: str, run_name: str, name: str, says: str):
    path = run_file(tmp_path, run_name)
    topic_changes.apply(load(path), {"bootstrap.servers": broker})
    code, line = fails("env", path, name, kafka=broker)
    assert code == ConfigError.exit_code and says in line


def test_a_missing_model_directory(tmp_path: Path, broker: str, run_name: str):
    path = run_file(tmp_path, run_name, model={"path": "/nowhere/llama", "max_seq_len": 64})
    topic_changes.apply(load(path), {"bootstrap.servers": broker})
    code, line = fails("learner", path, kafka=broker, timeout_s=120)
    assert (
        code == ModelError.exit_code
        and "/nowhere/llama does not exist" in line
        and "model.path" in line
    )


def test_inference_without_vllm(tmp_path: Path, broker: str, run_name: str):
    path = run_file(tmp_path, run_name, inference={"python": "/nowhere/python"})
    topic_changes.apply(load(path), {"bootstrap.servers": broker})
    code, line = fails("inference", path, kafka=broker)
    assert code != 0 and "/nowhere/python" in line


def test_an_unknown_run(tmp_path: Path):
    code, line = fails("status", tmp_path / "nope.yaml")
    assert code != 0 and "nope.yaml" in line


def test_what_a_library_raises_is_described_in_one_line():
    error = ValueError("no\n  such\tthing")
    assert describe_error(error) == "ValueError: no such thing"
