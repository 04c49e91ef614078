"""A real Prometheus that scrapes a run, with the settings and rules of deploy/prometheus; and what
its API and the dashboards say.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.run_file import RunFile
from tests.support.waiting import patience

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
PATIENCE_S = 240.0


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=patience(30)
        ) as answer:
            return json.load(answer)

    def query(self, expression: str) -> list[Any]:
        """Its series now. Raises for an expression that Prometheus does not take."""
        return self.get("/api/v1/query", query=expression)["data"]["result"]

    def until_answered(
        self,
        expressions: list[str],
        alive: subprocess.Popen[bytes] | None = None,
        within_s: float = PATIENCE_S,
    ) -> None:
        """Every expression has data, each at some moment: what has none after a while is named."""
        deadline = time.monotonic() + patience(within_s)
        left = list(expressions)
        while left := [expression for expression in left if not self.query(expression)]:
            assert alive is None or alive.poll() is None, f"the run ended; no data yet for {left}"
            assert time.monotonic() < deadline, f"no data for {left}"
            time.sleep(0.5)


@contextmanager
def prometheus(run: RunFile, directory: Path) -> Iterator[Prometheus]:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    [found] = settings["scrape_configs"][0]["file_sd_configs"]
    assert found["files"] == ["../../runs/.targets/*.json"]
    found |= {"files": [f"{run.directory.parent}/.targets/*.json"], "refresh_interval": "1s"}
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            started = Prometheus(f"http://{address}")
            deadline = time.monotonic() + patience(PATIENCE_S)
            while not answers(started):
                assert process.poll() is None and time.monotonic() < deadline, (
                    directory / "prometheus.log"
                ).read_text()
                time.sleep(0.1)
            yield started
        finally:
            process.terminate()
            process.wait(patience(60))


def answers(server: Prometheus) -> bool:
    try:
        return server.query("vector(1)") != []
    except OSError:
        return False


def expressions(dashboard: Path, run: str) -> list[str]:
    """Of every panel, with the variables filled in."""
    found = [
        target["expr"]
        for panel in json.loads(dashboard.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    return [expression.replace("$run", run) for expression in found]


def all_expressions(run: str) -> list[str]:
    return [expression for dashboard in DASHBOARDS for expression in expressions(dashboard, run)]


def check_rules(server: Prometheus) -> None:
    """Every alert is loaded, and its expression is one that this Prometheus evaluates."""
    deadline = time.monotonic() + patience(PATIENCE_S)
    while True:
        rules = [
            rule
            for group in server.get("/api/v1/rules")["data"]["groups"]
            for rule in group["rules"]
        ]
        if {rule["health"] for rule in rules} == {"ok"}:
            break
        assert time.monotonic() < deadline, [
            (rule["name"], rule["health"], rule.get("lastError")) for rule in rules
        ]
        time.sleep(0.5)
    wanted = [
        rule
        for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert sorted(rule["name"] for rule in rules) == sorted(rule["alert"] for rule in wanted)
    for rule in wanted:
        server.query(rule["expr"])
