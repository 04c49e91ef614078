"""The parts of an engine that need no Ray. `python -m tests.ray` has the rest, on a real one."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.config.run_file import parse
from streamrl.run.engines import ray
from streamrl.run.engines.machines import Machine
from streamrl.run.monitoring.verdict import TIME_OVER
from streamrl.run.orchestrator.plan import INTERRUPTED
from streamrl.run.orchestrator.requests import Request
from tests.support.waiting import patience, until

ENDS_WITH = [sys.executable, "-m", "tests.run.engines.ends_with"]
ROOT = str(Path(__file__).parents[3])


def actor(
    *arguments: str, leads: bool = False, command: list[str] = ENDS_WITH, **environment: str
) -> ray.MachineActor:
    machine = Machine("streamrl.r.m", [*command, *arguments], Request(1, 0, 0), leads)
    return ray.MachineActor(machine, {"PYTHONPATH": ROOT, **environment}, ROOT)


def test_ray_reserves_cpus_gpus_and_bytes_and_nothing_that_is_not_asked_for():
    assert ray.resources(Request(2.5, 1.5, 4)) == {"CPU": 2.5, "GPU": 4, "memory": 1.5 * (1 << 30)}
    assert ray.resources(Request(1, 0, 0)) == {"CPU": 1}


def test_a_shortage_names_what_is_wanted_and_what_the_nodes_have():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "object_store_memory": 1e9}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    said = ray.shortage([{"CPU": 2.5, "GPU": 4.0}, {"CPU": 1.0}], nodes)
    assert "Wanted: 2.5 CPU, 4 GPU; 1 CPU, 0 GPU; a node for each" in said
    assert said.endswith("nodes, free or not: 8 CPU, 2 GPU; 4 CPU, 0 GPU")
    assert ray.shortage([{"memory": 1.5 * (1 << 30)}], []).endswith(
        "Wanted: 1.5 GiB; a node for each. Its nodes, free or not: none"
    )


def test_a_run_for_which_there_is_no_place_says_so_once_and_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stop = threading.Event()
    waited: list[float] = []
    removed: list[Any] = []

    class Group:
        def wait(self, limit_s: float) -> bool:
            waited.append(limit_s)
            if len(waited) == 3:
                stop.set()
            return False

    modules: dict[str, Any] = {
        name: ModuleType(name)
        for name in ("ray", "ray.util.placement_group", "ray.util.scheduling_strategies")
    }
    modules["ray"].nodes = lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}]
    modules["ray.util.placement_group"].placement_group = lambda bundles, strategy: Group()
    modules["ray.util.placement_group"].remove_placement_group = removed.append
    modules["ray.util.scheduling_strategies"].PlacementGroupSchedulingStrategy = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray, "PATIENCE_S", 0.0)
    wanted = [Machine("streamrl.r.m", [], Request(4, 0, 0), leads=True)]
    assert ray._run(wanted, stop, resume=False) == INTERRUPTED  # pyright: ignore[reportPrivateUsage]
    said = [line for line in capsys.readouterr().out.splitlines() if "no place" in line]
    assert len(said) == 1 and "Wanted: 4 CPU" in said[0] and said[0].endswith("2 CPU")
    assert len(removed) == 1


@pytest.mark.parametrize("code", [0, 3, 143])
def test_an_actor_returns_the_exit_code_of_its_parts(code: int):
    assert actor(str(code)).run("10.0.0.1", again=False) == code


def test_a_stop_has_the_parts_end_which_are_started_once_however_often_ray_asks(
    capfd: pytest.CaptureFixture[str],
):
    machine = actor("143", "--on-signal")
    with ThreadPoolExecutor() as pool:
        code = pool.submit(machine.run, "10.0.0.1", False)
        until(lambda: "started" in capfd.readouterr().out)
        asked_again = pool.submit(machine.run, "10.0.0.1", False)
        machine.stop()
        machine.stop()
        assert code.result(patience(30)) == asked_again.result(patience(30)) == 143
    assert capfd.readouterr().out == "ended\n"


def test_an_actor_that_was_stopped_before_starts_no_parts():
    machine = actor("0")
    machine.stop()
    assert machine.run("10.0.0.1", again=False) == INTERRUPTED


SHOW = "import os, sys; print(sys.argv[1:], *map(os.environ.get, ('A', 'CUDA_VISIBLE_DEVICES', 'STREAMRL_INFERENCE_HOST')))"  # noqa: E501


@pytest.mark.parametrize(
    ("leads", "again", "shown"),
    [(True, False, "['up']"), (True, True, "['up', '--resume']"), (False, True, "['up']")],
)
def test_parts_have_the_variables_of_the_submitter_the_gpus_of_ray_and_the_node(
    leads: bool,
    again: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    command = [sys.executable, "-c", SHOW]
    machine = actor("up", leads=leads, command=command, A="a", CUDA_VISIBLE_DEVICES="0")
    assert machine.run("10.0.0.1", again) == 0
    assert capfd.readouterr().out == f"{shown} a 4,5 10.0.0.1\n"


class Call:
    """A method of an actor, as Ray has it: it is called by `remote`, which returns a future."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class Actor:
    """An actor whose parts end with `code`, or at a stop with 143. A `silent` one has no node."""

    def __init__(self, code: int | None, silent: bool = False) -> None:
        self.ends: Future[int] = Future()
        self.silent = silent
        if code is not None:
            self.ends.set_result(code)
        self.run_here = Call(lambda: self.ends)
        self.stop = Call(self._stop)

    def _stop(self) -> Future[None]:
        answer: Future[None] = Future()
        if not self.silent:
            answer.set_result(None)
            if not self.ends.done():
                self.ends.set_result(143)
        return answer


class Lost(Exception):
    pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's calls on the actors above."""

    def waits(calls: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[Any, Any]:
        done = [call for call in calls if wait([call], 0).done]
        return done, [call for call in calls if call not in done]

    module: Any = ModuleType("ray")
    module.wait = waits
    module.get = Future[int].result
    module.kill = lambda actor: actor.ends.set_exception(Lost())
    exceptions: Any = ModuleType("ray.exceptions")
    exceptions.RayActorError = Lost
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("lead", "others", "code"),
    [
        (Actor(0), [Actor(None), Actor(None)], 0),
        (Actor(0), [Actor(None, silent=True)], 0),
        (Actor(1), [Actor(0)], 1),
        (Actor(None), [Actor(76), Actor(None)], 76),
        (Actor(None), [Actor(0), Actor(76, silent=True)], 76),
        (Actor(None), [Actor(143), Actor(None)], 143),  # told to end by something else
        (Actor(TIME_OVER), [Actor(TIME_OVER)], TIME_OVER),
    ],
)
def test_the_end_of_the_lead_and_one_of_another_before_the_end_of_the_run_end_all_machines(
    lead: Actor, others: list[Actor], code: int
):
    actors = {"lead": lead, **{str(number): other for number, other in enumerate(others)}}
    assert ray.follow(actors, threading.Event()) == code
    assert all(actor.ends.done() for actor in actors.values())


@pytest.mark.usefixtures("fake")
def test_a_stop_ends_all_machines_also_one_without_a_node():
    stop = threading.Event()
    stop.set()
    actors = {"lead": Actor(None), "other": Actor(None, silent=True)}
    assert ray.follow(actors, stop) == INTERRUPTED
    assert actors["lead"].ends.result() == 143


def test_without_ray_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("STREAMRL_KAFKA", "kafka:9092")
    file = tmp_path / "r.yaml"
    file.write_text(f"run: r\nruns_dir: {tmp_path}\nenvs: {{copy-digits: {{}}}}\n")
    done = CliRunner().invoke(cli, ["up", str(file), "--on", "ray"])
    assert done.exit_code == 1
    assert "ray is not installed: pip install 'streamrl[ray]'" in done.output


def test_without_a_cluster_the_error_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def init(**_: Any) -> None:
        raise ConnectionError("none found")

    module: Any = ModuleType("ray")
    module.init = init
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setenv("STREAMRL_KAFKA", "kafka:9092")
    run = parse({"run": "r", "envs": {"copy-digits": {}}, "runs_dir": str(tmp_path)})
    with pytest.raises(ray.StreamrlError, match="no Ray answers; `ray start` it here"):
        ray.up(run, ["r.yaml"], threading.Event())
