from __future__ import annotations

from typing import Any

import pytest

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.run.orchestrator.placement import (
    JAX_MEMORY,
    VISIBLE,
    device_variables,
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
    assert [topology.devices_of(run, part) for part in servers] == [(7, 8), (9, 1)]


def test_parts_that_reserve_more_than_a_device_has_are_refused_with_the_sum():
    placement = {"learner": {"devices": [0]}, "inference": {"devices": [0]}}
    with pytest.raises(ConfigError, match=r"reserve 1.65 .* device 0 .*learner 0.75, inference-0"):
        run_of(placement, replicas=1)
    placement["learner"] = {"devices": [0], "memory_fraction": 0.1}
    assert run_of(placement, replicas=1).placement["learner"].memory_fraction == 0.1


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
