from typing import Any

import pytest

from streamrl.config import topology
from streamrl.config.run_file import parse
from streamrl.config.topology import Part
from streamrl.run.engines.pod_variables import ADDRESS, INDEX, VARIABLES, variables

SETTINGS: dict[str, Any] = {
    "run": "r",
    "envs": {
        "copy-digits": {
            "fraction": 0.4,
            "rewards": {"good": {"kind": "m:Judge", "params": {"api_key": "env:JUDGE_KEY"}}},
        },
        "hosted": {
            "kind": "m:Env",
            "host": "all",
            "fraction": 0.1,
            "params": {"token": "env:HOSTED"},
        },
        "agents": {"sessions": {"rewards": ["reward"]}, "fraction": 0.1},
        "served": {
            "kind": "verifiers:gsm8k",
            "python": "/opt/python",
            "fraction": 0.1,
            "api_key": "env:GATEWAY_KEY",
            "variables": ["SEARCH_KEY"],
        },
    },
    "kafka": {
        "bootstrap.servers": "kafka:9093",
        "sasl.username": "env:KAFKA_USER",
        "sasl.password": "env:KAFKA_PASSWORD",
        "ssl.key.password": "env:TLS_PASSWORD",
    },
    "learner": {"lora": {"rank": 4}},
    "inference": {
        "host": "env:POD_IP",
        "api_key": "env:KEY",
        "also_serves": {"second": {"api_key": "env:SECOND_KEY"}},
    },
    "gateway": {"signing_secret": "env:SECRET", "host": "0.0.0.0"},
    "eval": {"envs": {"copy-digits": {"params": {"token": "env:HELD_OUT"}}}},
    "orchestrator": {"sinks": [{"kind": "m:Sink", "params": {"token": "env:SINK"}}]},
}
KAFKA = {"KAFKA_USER", "KAFKA_PASSWORD", "TLS_PASSWORD"}


def given(part: str, settings: dict[str, Any] = SETTINGS) -> dict[str, Any]:
    """What a part has, by the name of the variable: its value, its field, or Secret and key."""
    run = parse(settings)
    parts = {part.name: part for part in topology.parts(run)}
    parts["orchestrator"] = Part("orchestrator", "orchestrator", "orchestrator")
    found: dict[str, Any] = {}
    for entry in variables(run, parts[part]):
        source = entry.get("valueFrom", {})
        secret = source.get("secretKeyRef")
        assert entry["name"] not in found
        found[entry["name"]] = (
            (secret["name"], secret["key"]) if secret else source or entry["value"]
        )
    return found


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("buffer", set[str]()),
        ("learner", {"TMPDIR"}),
        ("inference-0", {"POD_INDEX", "POD_IP", "KEY", "SECOND_KEY"}),
        ("env-copy-digits-0", {"POD_INDEX", "KEY", "JUDGE_KEY"}),
        ("host-all", {"KEY", "HOSTED"}),
        ("gateway-0", {"POD_INDEX", "KEY", "SECRET"}),
        ("assembler", set[str]()),
        ("evaluator", {"POD_IP", "KEY", "JUDGE_KEY", "HELD_OUT"}),
        ("env-served-0", {"POD_INDEX", "STREAMRL_GATEWAY_URL", "GATEWAY_KEY", "SEARCH_KEY"}),
        ("orchestrator", {"SINK"}),
    ],
)
def test_a_part_has_the_variables_that_it_needs_and_no_others(part: str, own: set[str]):
    assert set(given(part)) == KAFKA | own


def test_every_reference_of_the_run_file_reaches_a_part():
    run = parse(SETTINGS)
    everywhere = {name for part in topology.parts(run) for name in given(part.name)}
    everywhere |= set(given("orchestrator"))
    assert everywhere >= {
        *KAFKA,
        *("JUDGE_KEY", "HOSTED", "GATEWAY_KEY", "SEARCH_KEY", "POD_IP", "KEY", "SECOND_KEY"),
        *("SECRET", "HELD_OUT", "SINK"),
    }


def test_where_their_values_are():
    server = given("inference-0")
    assert server["POD_INDEX"] == INDEX and server["POD_IP"] == ADDRESS
    assert server["KAFKA_USER"] == "r.inference"
    assert server["KAFKA_PASSWORD"] == ("r.inference", "password")
    assert server["KEY"] == ("streamrl-inference", "key")
    # What has no Secret of its own is in one for all, under the variable's name.
    assert server["SECOND_KEY"] == (VARIABLES, "SECOND_KEY")
    assert server["TLS_PASSWORD"] == (VARIABLES, "TLS_PASSWORD")
    assert given("gateway-0")["SECRET"] == ("streamrl-gateway", "secret")
    served = given("env-served-0")
    assert served["KAFKA_USER"] == "r.env-served"
    assert served["GATEWAY_KEY"] == ("streamrl-gateway-served", "key")
    assert served["SEARCH_KEY"] == (VARIABLES, "SEARCH_KEY")
    assert served["STREAMRL_GATEWAY_URL"] == "http://gateway:8700"


def test_a_run_file_without_references_asks_for_no_secrets():
    assert given("buffer", {"run": "r", "envs": {"copy-digits": {}}}) == {}


def test_jax_is_told_its_share_of_the_memory():
    placed = {"learner": {"devices": [0], "memory_fraction": 0.92}, "inference": {"devices": [1]}}
    settings = {"run": "r", "envs": {"copy-digits": {}}, "placement": placed}
    assert given("learner", settings)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in given("inference-0", settings)
