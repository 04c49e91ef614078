"""The dashboards of deploy/grafana: every query of every panel has data, of a live run that a real
Prometheus scrapes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from streamrl.run.monitoring.metric_names import METRICS
from streamrl.stream.log.kafka import topic_changes
from tests.chaos import known
from tests.deploy.scraping import DASHBOARDS, DEPLOY, all_expressions, check_rules, prometheus
from tests.loop.runs import ROOT, live
from tests.support.waiting import patience

FOREIGN = re.compile(r"process_\w+|vllm:\w+")
STREAMRL = [sys.executable, "-m", "streamrl.cli"]


@pytest.fixture
def parts(
    broker: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, dict[str, subprocess.Popen[bytes]]]]:
    """A run of the real buffer, batcher and orchestrator, and stand-ins for the others: its run
    file, and its processes.
    """
    monkeypatch.setenv("STREAMRL_KAFKA", broker)
    run = known.run_file(tmp_path / run_name)
    run.directory.mkdir()
    file = run.directory / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    topic_changes.apply(run, {"bootstrap.servers": broker})
    commands = {
        name: [*STREAMRL, name, str(file)] for name in ("buffer", "batcher", "orchestrator")
    }
    commands["stand-ins"] = [sys.executable, "-m", "tests.deploy.standins", str(file)]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (tmp_path / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ.copy(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        yield file, processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(patience(60))


def test_every_query_has_data_and_every_alert_is_taken(
    parts: tuple[Path, dict[str, subprocess.Popen[bytes]]], tmp_path: Path
):
    file, processes = parts
    run = known.run_file(file.parent)
    with prometheus(run, tmp_path) as server:
        server.until_answered(all_expressions(run.run), processes["stand-ins"])
        check_rules(server)
        assert {
            series["metric"]["part"] for series in server.query(f'up{{run="{run.run}"}} == 1')
        } >= {"buffer-0", "batcher", "orchestrator"}
        assert server.query('streamrl_nothing{run="x"}') == []  # what is not there has no data
        assert all(process.poll() is None for process in processes.values())


@pytest.mark.live
@pytest.mark.slow
def test_every_query_has_data_of_a_whole_run(tmp_path: Path):
    """Nothing is stood in for: learner, vLLM, and the evaluator with a vLLM of its own."""
    settings = yaml.safe_load((DEPLOY / "runs" / "evaluated.yaml").read_text())
    with live(
        tmp_path,
        {**settings, "run": "watched", "orchestrator": {"sinks": ["jsonl", "tensorboard"]}},
    ) as run:
        run.up()
        with prometheus(run.run, tmp_path) as server:
            # two vLLM start
            server.until_answered(all_expressions("watched"), run.process, within_s=900)
            check_rules(server)
            names = server.get("/api/v1/label/__name__/values")["data"]
            assert {name for name in names if name.startswith("streamrl_")} <= {
                known.prometheus for known in METRICS
            }
        assert run.command("down", str(run.file)).returncode == 0
        run.wait(60)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_metrics_that_there_are(path: Path):
    dashboard = json.loads(path.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {
        name
        for expression in asked
        for name in re.findall(r"streamrl_\w+|process_\w+|vllm:\w+", expression)
    }
    assert len(asked) > 20
    assert {name for name in names if not FOREIGN.fullmatch(name)} <= {
        known.prometheus for known in METRICS
    }
    assert all("$run" in expression for expression in asked)
    assert dashboard["uid"] == path.stem and len(
        {panel["id"] for panel in dashboard["panels"]}
    ) == len(dashboard["panels"])


def test_the_provisioning_is_where_it_says():
    for file in (DEPLOY / "grafana" / "provisioning").rglob("*.yml"):
        assert yaml.safe_load(file.read_text())["apiVersion"] == 1
