from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.cli.shared import open_log
from streamrl.config.run_file import parse
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from tests.support.command import streamrl
from tests.support.waiting import patience


def test_a_run_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "run.yaml").touch()
    result = CliRunner().invoke(cli, ["status", "nosuch"])
    assert (
        result.exit_code == 2
        and "nosuch: neither a run file nor a run in runs/ (there: other)" in result.stderr
    )
    (tmp_path / "demo.yaml").touch()
    result = CliRunner().invoke(cli, ["status", "demo"])
    assert result.exit_code == 2 and result.stderr.endswith("; demo.yaml is a run file\n")
    result = CliRunner().invoke(cli, ["env", "demo.yaml"])
    assert result.exit_code == 2 and "name one of its envs: streamrl env demo.yaml" in result.stderr
    result = CliRunner().invoke(cli, ["status", "missing.yaml"])
    assert result.exit_code == 2 and "missing.yaml: cannot be read" in result.stderr


def test_missing_topics_are_one_line(run_file: Path, broker: str):
    failed = streamrl("batcher", run_file, STREAMRL_KAFKA=broker)
    assert failed.returncode == 4 and "streamrl topics apply" in failed.stderr


def test_a_broker_knows_each_part_by_its_client_id(run_name: str, broker: str):
    run = parse({"run": run_name, "envs": {"a": {}}, "kafka": {"bootstrap.servers": broker}})
    topic_changes.apply(run, dict(run.kafka))
    with open_log(run, "batcher") as log:
        assert isinstance(log, KafkaLog) and log.settings["client.id"] == f"{run_name}.batcher"
    named = run.model_copy(update={"kafka": {**run.kafka, "client.id": "mine"}})
    with open_log(named, "batcher") as log:
        assert isinstance(log, KafkaLog) and log.settings["client.id"] == "mine"


def test_a_part_leaves_when_asked(run_file: Path, broker: str):
    assert streamrl("topics", "apply", run_file, STREAMRL_KAFKA=broker).returncode == 0
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


def test_an_unknown_log_level_is_refused(run_file: Path):
    failed = CliRunner(env={"STREAMRL_LOG": "loud"}).invoke(cli, ["up", str(run_file)])
    assert failed.exit_code == 2 and "STREAMRL_LOG is 'LOUD'" in failed.stderr
