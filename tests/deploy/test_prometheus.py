"""deploy/prometheus, by Prometheus's own checker: settings, rules, and each alert made to fire."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.run.monitoring.metric_names import METRICS
from tests.support.waiting import patience

DIRECTORY = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((DIRECTORY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
TESTS: list[dict[str, Any]] = yaml.safe_load((DIRECTORY / "alerts.test.yml").read_text())["tests"]
KAFKA = {
    "kafka_controller_kafkacontroller_offlinepartitionscount",
    "kafka_server_replicamanager_underminisrpartitioncount",
    "kafka_server_replicamanager_underreplicatedpartitions",
}
VOLUMES = {"kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"}
OTHERS = {"up"} | KAFKA | VOLUMES  # of Prometheus, of Strimzi's metrics reporter, of the kubelet


def promtool(*arguments: str, cwd: Path = DIRECTORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, cwd=cwd, timeout=patience(120)
    )


@pytest.mark.parametrize("file", ["prometheus.yml", "prometheus-compose.yml"])
def test_prometheus_takes_the_settings(file: str):
    checked = promtool("check", "config", file)
    assert checked.returncode == 0 and "is valid prometheus config" in checked.stdout, (
        checked.stdout + checked.stderr
    )


def test_prometheus_takes_the_settings_for_kubernetes(tmp_path: Path):
    """Debian builds it without discovery on Kubernetes; what is left without that is checked."""
    jobs = yaml.safe_load((DIRECTORY / "prometheus-kubernetes.yml").read_text())["scrape_configs"]
    assert not any(job.get("honor_labels") for job in jobs), "a pod would choose its own labels"
    text, count = re.subn(
        r"kubernetes_sd_configs: \[\{role: pod\}\]",
        "static_configs: []",
        (DIRECTORY / "prometheus-kubernetes.yml").read_text(),
    )
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DIRECTORY / "alerts.yml", tmp_path)
    checked = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert count == 3 and checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_fires_when_it_should_and_only_then():
    checked = promtool("test", "rules", "alerts.test.yml")
    assert checked.returncode == 0 and "SUCCESS" in checked.stdout, checked.stdout + checked.stderr


@pytest.mark.parametrize("alert", RULES)
@pytest.mark.parametrize(
    "expression",
    ["vector(0) > 1", 'label_replace(vector(1), "run", "good", "", "")'],
    ids=["never", "always"],
)
def test_the_test_of_an_alert_can_fail(alert: str, expression: str, tmp_path: Path):
    rules = yaml.safe_load((DIRECTORY / "alerts.yml").read_text())
    for rule in (
        rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == alert
    ):
        rule["expr"] = expression
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    mine = [test for test in TESTS if test["alert_rule_test"][0]["alertname"] == alert]
    (tmp_path / "alerts.test.yml").write_text(
        yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": mine})
    )
    failed = promtool("test", "rules", "alerts.test.yml", cwd=tmp_path)
    assert (
        mine and failed.returncode == 1 and f"alertname: {alert}" in failed.stdout + failed.stderr
    )


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_what_it_is_and_where_to_read_on(alert: str):
    rule = RULES[alert]
    assert rule["annotations"]["runbook"] == f"docs/operations.md#{alert.lower()}"
    whose = "Kafka" if alert.startswith("Kafka") else "$labels.run"
    assert whose in rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_asks_for_metrics_that_there_are(alert: str):
    asked = set(
        re.findall(
            r"\b((?:streamrl|kafka|kubelet)_\w+|up)\b(?=[{\[ )]|$)",
            RULES[alert]["expr"],
            re.MULTILINE,
        )
    )
    assert asked and asked <= {known.prometheus for known in METRICS} | OTHERS
