from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import engine_settings, topology
from streamrl.config.run_file import RunFile, parse, parse_resolved
from streamrl.run.orchestrator import placement as module
from streamrl.run.orchestrator.placement import (
    JAX_MEMORY,
    VISIBLE,
    device_variables,
    placed_here,
    visible_devices,
)
from streamrl.system.errors import ConfigError

ALL = {"learner": {"devices": [0, 1, 2, 3]}, "inference": {"devices": [4, 5, 6, 7]}}


def run_of(placement: dict[str, Any], replicas: int = 2) -> RunFile:
    return parse(
        {
            "run": "r",
            "envs": {"copy": {}},
            "inference": {"replicas": replicas},
            "placement": placement,
        }
    )


def variables(run: RunFile, visible: list[str] | None = None) -> dict[str, dict[str, str]]:
    return {part.name: device_variables(run, part, visible) for part in topology.parts(run)}


def test_without_a_placement_every_part_sees_what_the_orchestrator_sees():
    assert not any(variables(run_of({})).values())


def test_a_role_shares_its_devices_and_others_see_none():
    seen = {name: own[VISIBLE] for name, own in variables(run_of(ALL)).items()}
    assert seen == {
        "learner": "0,1,2,3",
        "inference-0": "4,5",
        "inference-1": "6,7",
        "buffer": "",
        "batcher": "",
        "env-copy-0": "",
    }


def test_a_part_of_its_own_is_left_out_of_its_role():
    seen = variables(run_of({**ALL, "inference-1": {"devices": [8]}}, replicas=3))
    assert [seen[f"inference-{index}"][VISIBLE] for index in range(3)] == ["4,5", "8", "6,7"]


def test_the_share_of_memory_that_jax_reserves():
    own = {**ALL, "learner": {"devices": [0], "memory_fraction": 0.4}}
    seen = variables(run_of(own))
    assert seen["learner"] == {VISIBLE: "0", JAX_MEMORY: "0.4"}
    assert JAX_MEMORY not in seen["inference-0"]


def test_devices_are_counted_among_those_that_the_orchestrator_sees():
    """As a scheduler has given them to the job."""
    visible = visible_devices("8, 9,10,11,12,13,14,GPU-5")
    seen = variables(run_of(ALL), visible)
    assert (seen["learner"][VISIBLE], seen["inference-1"][VISIBLE]) == ("8,9,10,11", "14,GPU-5")
    assert visible_devices(None) is None and visible_devices("") == []
    with pytest.raises(ConfigError, match="placement of learner: there is no device 3, as CUDA"):
        variables(run_of(ALL), ["0", "1"])


def test_each_part_of_a_role_gets_a_stretch_of_its_devices():
    run = run_of({"learner": {"devices": [0]}, "inference": {"devices": [7, 8, 9, 1]}})
    servers = [part for part in topology.parts(run) if part.role == "inference"]
    numbers = [[d.number for d in topology.devices_of(run, part)] for part in servers]
    assert numbers == [[7, 8], [9, 1]]


def reserved(run: RunFile) -> dict[str, dict[str, float]]:
    return {str(device): parts for device, parts in topology.reserved_memory(run).items()}


MEETING = {"learner": {"devices": [0]}, "inference": {"devices": [0]}}


def test_parts_that_meet_on_a_device_have_shares_of_its_memory():
    run = run_of(MEETING, replicas=1)
    assert reserved(run) == {"0": {"learner": 0.5, "inference-0": 0.35}}
    assert variables(run)["learner"] == {VISIBLE: "0", JAX_MEMORY: "0.5"}
    assert run.inference.engine == {"gpu_memory_utilization": 0.35}
    assert "--gpu-memory-utilization" in engine_settings.arguments(run.inference.engine)


def test_shares_that_are_given_stay_and_those_of_a_pool_are_its_own():
    given = {**MEETING, "learner": {"devices": [0, 1], "memory_fraction": 0.1}}
    settings = {
        "run": "r",
        "envs": {"copy": {}},
        "inference": {"pools": {"judge": {"model": "/models/judge"}}},
        "placement": {**given, "inference-judge-0": {"devices": [2]}},
    }
    run = parse(settings)
    assert reserved(run) == {
        "0": {"learner": 0.1, "inference-0": 0.35},
        "1": {"learner": 0.1},
        "2": {"inference-judge-0": 0.9},
    }
    # what the run keeps is read again as it is
    again = parse_resolved(run.model_dump(mode="json"), "run.yaml")
    assert reserved(again) == reserved(run)


def test_parts_that_reserve_more_than_a_device_has_are_refused_with_the_sum():
    placement = {**MEETING, "learner": {"devices": [0], "memory_fraction": 0.75}}
    with pytest.raises(ConfigError, match=r"reserve 1.1 .* device 0 .*learner 0.75, inference-0"):
        run_of(placement, replicas=1)


def test_on_several_machines_each_has_devices_and_memory_of_its_own():
    """Of four servers of two GPUs there are two on each of two machines."""
    eight = [*range(8)]
    run = run_of(
        {
            "learner": {"nodes": ["a"], "devices": eight},
            "inference": {"nodes": ["b", "c"], "devices": eight[:4]},
        },
        replicas=4,
    )
    servers = [part for part in topology.parts(run) if part.role == "inference"]
    places = [
        (device.node, device.number)
        for part in servers
        for device in topology.devices_of(run, part)
    ]
    assert places == [(node, number) for node in "bc" for number in range(4)]
    assert reserved(run)["0 of a"] == {"learner": 0.75}
    assert reserved(run)["0 of b"] == {"inference-0": 0.9}
    with pytest.raises(ConfigError, match="start on each what is its own, with --only or --except"):
        placed_here(run, topology.parts(run))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Pretends that JAX has CUDA, and that `nvidia-smi` lists these GPUs."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(module, "CUDA_PLUGIN", "json")

    def of(*lines: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return of


def test_without_a_placement_the_parts_share_the_only_gpu(machine: Callable[..., None]):
    machine("81559, 580.82.07, NVIDIA H100 80GB HBM3")
    run = run_of({}, replicas=1)
    placed = placed_here(run, topology.parts(run))
    assert reserved(placed) == {"0": {"learner": 0.5, "inference-0": 0.35}}
    alone = topology.chosen_parts(run, excluded=["inference"])
    assert placed_here(run, alone).placement == {}


def test_several_gpus_without_a_placement_are_refused(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    machine(*["81559, 580.82.07, NVIDIA H100 80GB HBM3"] * 8)
    run = run_of({}, replicas=1)
    with pytest.raises(ConfigError, match="8 GPUs, and learner, inference-0 would all begin with"):
        placed_here(run, topology.parts(run))
    monkeypatch.setenv(VISIBLE, "3")
    assert reserved(placed_here(run, topology.parts(run))).keys() == {"0"}


def test_a_driver_too_old_for_cuda_13_is_refused(machine: Callable[..., None]):
    machine("24564, 550.54.14, NVIDIA GeForce RTX 4090")
    run = run_of({}, replicas=1)
    with pytest.raises(ConfigError, match=r"RTX 4090 is 550.54.14, and CUDA 13 needs 580 or"):
        placed_here(run, topology.parts(run))


def test_a_machine_without_gpus_places_nothing(machine: Callable[..., None]):
    machine()
    run = run_of({}, replicas=1)
    assert placed_here(run, topology.parts(run)) == run


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"learner": {"devices": [0]}}, "inference-0 is not named and would see no GPU"),
        ({**ALL, "lerner": {}}, "placement.lerner: no role or part .* did you mean 'learner'"),
        (
            {"learner": {"devices": [0, 0]}, "inference": {}},
            r"placement.learner.devices: \[0, 0\] has a device twice",
        ),
        (
            {"learner": {}, "inference": {"devices": [0, 1, 2]}},
            "3 devices cannot be divided among inference-0, inference-1; give a multiple of 2",
        ),
        ({"learner": {"devices": [-1]}, "inference": {}}, "placement.learner.devices.0: .*than or"),
        ({**ALL, "learner": {"device": [0]}}, "unknown key 'placement.learner.device'"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(placement: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        run_of(placement)


def test_a_server_with_fewer_devices_than_its_model_is_divided_over_is_refused():
    def servers(placement: dict[str, Any], tensor_parallel: int) -> RunFile:
        inference = {
            "replicas": 1,
            "pools": {"judges": {"model": "/models/judge", "tensor_parallel": tensor_parallel}},
        }
        settings = {"run": "r", "envs": {"copy": {}}, "inference": inference}
        return parse({**settings, "placement": {"learner": {"devices": [0]}, **placement}})

    shared = {"inference": {"devices": [4, 5]}}
    named = {"inference": {"devices": [4]}, "inference-judges-0": {"devices": [5, 6]}}
    servers(shared, 1)
    servers(named, 2)
    with pytest.raises(ConfigError, match="inference-judges-0 has 1 devices, .* of its pool is 2"):
        servers(shared, 2)
    with pytest.raises(ConfigError, match="inference-judges-0 has 2 devices, .* of its pool is 4"):
        servers(named, 4)


def test_the_processes_of_a_learner_share_its_devices():
    run = parse(
        {
            "run": "r",
            "envs": {"copy": {}},
            "learner": {"processes": 2},
            "placement": {"learner": {"devices": [0, 1, 2, 3]}, "inference": {}},
        }
    )
    found = variables(run)
    assert [found[name][VISIBLE] for name in ("learner-0", "learner-1")] == ["0,1", "2,3"]
