from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from streamrl.cli.command import cli
from streamrl.stream.log.kafka import doctor
from streamrl.stream.log.kafka.doctor import Missing, Trial, Unseen


def topics(*arguments: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(cli, ["topics", *map(str, arguments)])


def test_the_plan_and_the_manifests_ask_no_broker(run_file: Path, run_name: str):
    planned = topics("plan", run_file)
    assert f"{run_name}.rollouts.copy-digits  partitions 1, replicas 1" in planned.stdout
    rendered = topics("render", run_file, "--cluster", "mine")
    made = list(yaml.safe_load_all(rendered.stdout))
    assert len(made) == len(planned.stdout.splitlines())
    assert {topic["metadata"]["labels"]["strimzi.io/cluster"] for topic in made} == {"mine"}
    assert "remote.storage.enable" not in rendered.stdout
    assert "remote.storage.enable: 'true'" in topics("render", run_file, "--tiered", 24).stdout


def test_they_are_made_once_and_deleted_when_somebody_agrees(
    run_file: Path, run_name: str, broker: str
):
    assert topics("diff", run_file, STREAMRL_KAFKA=broker).exit_code == 1
    applied = topics("apply", run_file, STREAMRL_KAFKA=broker)
    assert f"+ {run_name}.batches" in applied.stdout
    assert topics("apply", run_file, STREAMRL_KAFKA=broker).stdout == "nothing to change\n"
    assert topics("diff", run_file, STREAMRL_KAFKA=broker).exit_code == 0
    assert topics("delete", run_file, STREAMRL_KAFKA=broker).exit_code == 1
    assert topics("diff", run_file, STREAMRL_KAFKA=broker).exit_code == 0
    assert topics("delete", run_file, "--yes", STREAMRL_KAFKA=broker).exit_code == 0
    assert topics("diff", run_file, STREAMRL_KAFKA=broker).exit_code == 1


def test_access_rules_are_listed_or_rendered_or_applied(run_file: Path, run_name: str):
    assert f"topic {run_name}.policy-versions" in topics("acls", run_file).stdout
    assert "kind: KafkaUser" in topics("acls", run_file, "--render").stdout
    both = topics("acls", run_file, "--apply", "--render")
    assert both.exit_code == 2 and "exclude each other" in both.stderr
    guest = topics("acls", run_file, "--guest", run_file)
    assert guest.exit_code == 2 and "--guest goes with --render" in guest.stderr


def test_an_administrators_credentials_go_where_his_file_says_and_not_the_run_file(
    run_file: Path, run_name: str, broker: str, tmp_path: Path
):
    """The run file has an address at which nothing listens."""
    settings = yaml.safe_load(run_file.read_text())
    run_file.write_text(yaml.safe_dump({**settings, "kafka": {"bootstrap.servers": "127.0.0.1:1"}}))
    refused = topics("acls", run_file, "--apply")
    assert refused.exit_code == 2 and "--apply needs --kafka FILE" in refused.stderr
    admin = tmp_path / "admin.properties"
    admin.write_text(f"bootstrap.servers={broker}\n")
    named = topics("acls", run_file, "--apply", "--kafka", admin)
    assert named.exit_code != 0 and f"the broker at {broker} has no authorizer" in named.stderr
    assert f"+ {run_name}.batches" in topics("apply", run_file, "--kafka", admin).stdout
    assert topics("diff", run_file, "--kafka", admin).exit_code == 0
    assert topics("delete", run_file, "--yes", "--kafka", admin).exit_code == 0


def test_a_doctor_states_each_finding_in_a_line(
    run_file: Path, run_name: str, broker: str, monkeypatch: pytest.MonkeyPatch
):
    def look_at_clocks(trial: Trial) -> str:
        raise Missing("they differ [by] an hour")

    def look_for_room(trial: Trial) -> str:
        raise Unseen("who knows")

    def checks(*names: str) -> dict[str, Any]:
        return {name: found[name] for name in names}

    found = {**doctor.CHECKS, "clocks": look_at_clocks, "room": look_for_room}
    monkeypatch.setattr(doctor, "CHECKS", checks("copies", "topics", "room"))
    good = CliRunner(env={"STREAMRL_KAFKA": broker}).invoke(cli, ["doctor", str(run_file)])
    assert (good.exit_code, good.stderr) == (0, "")
    assert [line.split()[:2] for line in good.stdout.splitlines()] == [
        ["copies", "ok"],
        ["topics", "ok"],
        ["room", "unseen"],
        ["removal", "ok"],
    ]
    monkeypatch.setattr(doctor, "CHECKS", checks("clocks"))
    bad = CliRunner(env={"STREAMRL_KAFKA": broker}).invoke(cli, ["doctor", str(run_file)])
    assert bad.exit_code == 2 and bad.stderr == f"streamrl: {broker} needs changes: clocks\n"
    assert bad.stdout.splitlines()[0] == "clocks  missing  they differ [by] an hour"


def test_a_broker_needs_its_run():
    result = CliRunner().invoke(cli, ["broker"])
    assert result.exit_code == 2 and "Missing argument 'RUN'" in result.stderr
