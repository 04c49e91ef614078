import sys
from pathlib import Path

import pytest

from streamrl.config.run_file import parse
from streamrl.run.engines.machines import Machine, machines, prepare
from streamrl.run.orchestrator.requests import Request
from streamrl.system.errors import ConfigError

COMMAND = [sys.executable, "-m", "streamrl.cli", "up", "r.yaml"]
PLACEMENT = {"learner": {"nodes": ["trains"], "cpus": 4}, "env": {"nodes": ["samples"]}}


def test_the_first_machine_leads_and_has_every_part_that_no_other_has(tmp_path: Path):
    settings = {"run": "r", "envs": {"copy-digits": {}}, "runs_dir": str(tmp_path)}
    run = parse({**settings, "inference": {"replicas": 0}, "placement": PLACEMENT})
    leads, samples = machines(run, ["r.yaml"])
    assert leads.leads and not samples.leads
    assert leads.command == [*COMMAND, "--except=env-copy-digits-0"]
    assert samples == Machine(
        "streamrl.r.samples", [*COMMAND, "--only=env-copy-digits-0"], Request(1, 0, 0), False
    )
    assert leads.request.cpus == 6


def test_a_run_that_names_no_machine_has_one_with_all_parts(tmp_path: Path):
    run = parse({"run": "r", "envs": {"copy-digits": {}}, "runs_dir": str(tmp_path)})
    (machine,) = machines(run, ["r.yaml"])
    assert (machine.name, machine.command, machine.leads) == ("streamrl.r", COMMAND, True)


def test_parts_that_would_not_meet_get_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_KAFKA", "127.0.0.1:9092")
    run = parse({"run": "r", "envs": {"copy-digits": {}}, "runs_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"Kafka at 127\.0\.0\.1:9092 is reached from its own"):
        prepare(run, fresh=False)
    assert not run.directory.exists()
