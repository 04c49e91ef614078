from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from streamrl.config import topology
from streamrl.config.run_file import parse
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.run_view import RunView
from streamrl.run.monitoring.targets import targets_file
from streamrl.run.orchestrator import liveness, parts, plan
from streamrl.run.orchestrator.liveness import BrokerWatch, Liveness
from streamrl.run.orchestrator.parts import SupervisedParts, parts_by_metrics, without_prefix
from streamrl.run.orchestrator.plan import PartState
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.stream.log.memory import MemoryLog
from tests.support.waiting import until

LIVES = """
import http.server, json, pathlib, sys
class Stands(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b"buffer: its loop last ran 61 s ago, the limit is 60 s")
server = http.server.HTTPServer(("127.0.0.1", 0), Stands)
note = pathlib.Path(sys.argv[1])
note.parent.mkdir(parents=True, exist_ok=True)
note.write_text(json.dumps([{"targets": [f"127.0.0.1:{server.server_port}"]}]))
server.serve_forever()
"""


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, frame: Frame) -> None: ...

    def close(self) -> None: ...


def test_a_part_that_hangs_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
        }
    )
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    hangs = [sys.executable, "-c", LIVES, str(targets_file(run, "buffer"))]
    monkeypatch.setattr(
        parts, "command", lambda run, part: hangs if part.name == "buffer" else sleeps
    )
    monkeypatch.setattr(liveness, "PERIOD_S", 0.01)
    monkeypatch.setattr(plan, "BACKOFF_S", 0.01)
    said = Said()
    supervisor = Supervisor(tmp_path / "logs")
    try:
        with Liveness(run, topology.identities(run)) as asked:
            supervised = SupervisedParts(
                run, supervisor, asked, BrokerWatch(MemoryLog({})), topology.parts(run)
            )
            until(
                lambda: (
                    supervised.keep_running(said) is None
                    and any("starting it again" in line for line in said.lines)
                )
            )
            lives = {line.name: line.restarts for line in supervised.lines()}
    finally:
        supervisor.close(limit_s=1.0)
    assert (
        said.lines[0]
        == "buffer is ended, and started again: buffer: its loop last ran 61 s ago, the limit is"
        " 60 s"
    )
    assert lives.pop("buffer") >= 1 and set(lives.values()) == {0}


class Started:
    """Takes what is started, and starts nothing."""

    def __init__(self) -> None:
        self.variables: dict[str, Mapping[str, str]] = {}

    def has(self, name: str) -> bool:
        return False

    def notice_exits(self, ready: Container[str] = (), broker_answers: bool = False) -> None: ...

    def observe(self, hanging: Mapping[str, str] | None = None) -> dict[str, PartState]:
        return {}

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.variables[name] = variables


def test_parts_are_started_with_the_gpus_of_their_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    run = parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
            "placement": {"learner": {"devices": [1]}, "inference": {"devices": [0]}},
        }
    )
    started = Started()
    with Liveness(run, topology.identities(run)) as asked:
        supervised = SupervisedParts(
            run,
            cast(Supervisor, started),
            asked,
            BrokerWatch(MemoryLog({})),
            topology.parts(run),
        )
        assert supervised.keep_running(Said()) is None
    seen = {name: own["CUDA_VISIBLE_DEVICES"] for name, own in started.variables.items()}
    assert (seen["learner"], seen["inference-0"], seen["buffer"]) == ("7", "6", "")


def test_the_words_of_a_log_line():
    assert (
        without_prefix(
            "2026-11-21 06:01:14 WARNING streamrl.stream.processor.processor: batcher: short"
        )
        == "batcher: short"
    )
    assert without_prefix("streamrl: no broker") == "no broker"
    assert without_prefix("anything else") == "anything else"


def test_parts_that_others_started_are_known_by_their_metrics():
    seen = RunView(
        "lead",
        since_s=50.0,
        heard_s={"buffer": 99.0, "batcher": 60.0, "learner": 10.0, "orchestrator": 100.0},
    )
    assert [(part.name, part.state) for part in parts_by_metrics(seen, 100.0)] == [
        ("batcher", "silent"),
        ("buffer", "running"),
    ]


def test_a_gang_meets_at_a_new_place_whenever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
            "learner": {"processes": 2},
            "metrics": {"serve": False},
        }
    )
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    asked = list[list[str]]()
    monkeypatch.setattr(parts, "command", lambda run, part: [*sleeps, part.name, *part.options])
    start = Supervisor.start

    def started(self: Supervisor, name: str, line: Sequence[str], *more: Mapping[str, str]) -> None:
        if name.startswith("learner"):
            asked.append([*line[4:]])
        start(self, name, line, *more)

    monkeypatch.setattr(Supervisor, "start", started)
    said = Said()
    supervisor = Supervisor(tmp_path / "logs")
    try:
        with Liveness(run, topology.identities(run)) as lives:
            supervised = SupervisedParts(
                run, supervisor, lives, BrokerWatch(MemoryLog({})), topology.parts(run)
            )
            supervised.keep_running(said)
            first = {name: supervisor.pid(name) for name in ("learner-0", "learner-1", "buffer")}
            supervisor.kill("learner-1", "the test ends it")
            until(lambda: supervised.keep_running(said) is None and len(asked) == 4)
            second = {name: supervisor.pid(name) for name in first}
    finally:
        supervisor.close(limit_s=1.0)
    assert [name for name in first if first[name] == second[name]] == ["buffer"]
    places = [line.pop() for line in asked]
    assert asked == 2 * [
        ["learner-0", "--processes", "2", "--index", "0", "--coordinator"],
        ["learner-1", "--processes", "2", "--index", "1", "--coordinator"],
    ]
    assert places[0] == places[1] != places[2] == places[3]
    assert any("learner-1 has ended, and they run together" in line for line in said.lines)
