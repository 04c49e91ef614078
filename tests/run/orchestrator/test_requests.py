from typing import Any

import pytest

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.run.orchestrator.requests import Request, machine_request, obstacles, part_request

PLACEMENT = {
    "learner": {"nodes": ["a"], "devices": [0, 1], "cpus": 16, "memory_gib": 64},
    "inference": {"nodes": ["b"], "devices": [0, 1, 2, 3], "cpus": 4, "memory_gib": 24},
}


def run_with(**settings: Any) -> RunFile:
    return parse({"run": "r", "envs": {"copy-digits": {}}, **settings})


def requests(run: RunFile) -> dict[str, Request]:
    return {part.name: part_request(run, part) for part in topology.parts(run)}


def test_a_part_gets_its_own_share_of_the_devices_and_the_cpus_of_its_role():
    run = run_with(placement=PLACEMENT, inference={"replicas": 2})
    assert requests(run) == {
        "learner": Request(16, 64.0, 2),
        "inference-0": Request(4, 24.0, 2),
        "inference-1": Request(4, 24.0, 2),
        "buffer": Request(1, 0.0, 0),
        "batcher": Request(1, 0.0, 0),
        "env-copy-digits-0": Request(1, 0.0, 0),
    }


def test_a_machine_has_the_sum_of_its_parts_and_gpus_up_to_the_last_that_is_named():
    run = run_with(placement=PLACEMENT, inference={"replicas": 2})
    asked = {name: machine_request(run, parts) for name, parts in topology.machines(run).items()}
    # The memory of three of its parts is not known.
    assert asked == {"a": Request(19, 0.0, 2), "b": Request(8, 48.0, 4)}


@pytest.mark.parametrize(
    ("request_", "shown"),
    [(Request(1, 0.0, 0), "1 CPU"), (Request(2, 1.5, 1), "2 CPUs, 1.5 GiB, 1 GPU")],
)
def test_a_request_as_text(request_: Request, shown: str):
    assert str(request_) == shown


ALONE = {"learner": {"nodes": ["b"]}}
REACHED = {"inference": {"host": "env:HOST", "api_key": "env:KEY"}}


@pytest.mark.parametrize(
    ("kafka", "settings", "problems"),
    [
        ("kafka:9092", {**REACHED, "placement": PLACEMENT}, []),
        ("", {**REACHED, "placement": PLACEMENT}, ["no Kafka that other machines reach"]),
        ("127.0.0.1:1,localhost:2", REACHED, ["is reached from its own machine only"]),
        ("[::1]:9092", REACHED, ["is reached from its own machine only"]),
        ("kafka:9092", {"placement": PLACEMENT}, ["inference.host 127.0.0.1 is reached"]),
        ("kafka:9092", {}, []),
        (
            "kafka:9092",
            {"inference": {"replicas": 0}, "placement": {"env": {"nodes": ["a"]}, **ALONE}},
            [],
        ),
        (
            "kafka:9092",
            {
                **REACHED,
                "learner": {"processes": 2},
                "placement": {"learner": {"nodes": ["a", "b"]}, "inference": {"nodes": ["a"]}},
            },
            ["learner-0, learner-1 start together and have machines a, b"],
        ),
    ],
)
def test_what_keeps_the_parts_of_a_run_from_meeting(
    kafka: str,
    settings: dict[str, Any],
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("STREAMRL_KAFKA", kafka)
    found = list(obstacles(run_with(**settings)))
    assert len(found) == len(problems)
    for text, problem in zip(found, problems, strict=True):
        assert problem in text
