from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.system.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


LORA = "learner.lora={rank: 4}"


@pytest.mark.parametrize(
    ("guests", "says"),
    [
        ("{quickstart: {}}", "quickstart is this run"),
        ("{Second: {}}", "'Second' is not the name of a run"),
        ("{second: {api_key: plain}}", "second.api_key: a secret does not belong in a run file"),
        ("{second: {api_key: env:B}}", "second.api_key is set, and inference.api_key is not"),
    ],
)
def test_runs_that_servers_cannot_serve_as_well_are_named(guests: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [LORA, f"inference.also_serves={guests}"])


def test_a_server_has_adapters_of_several_runs_and_no_whole_models():
    assert run_file.load(QUICKSTART, [LORA, "inference.also_serves={second: {}}"])
    with pytest.raises(ConfigError, match=r"set learner.lora, or leave also_serves out"):
        run_file.load(QUICKSTART, ["inference.also_serves={second: {}}"])


@pytest.mark.parametrize(
    ("guests", "says"),
    [
        ("{second: {}}", r"second.api_key is not set: servers with a key answer no run without"),
        ("{second: {api_key: env:A}}", "second.api_key is env:A, as is inference.api_key"),
        (
            "{second: {api_key: env:B}, third: {api_key: env:B}}",
            "third.api_key is env:B, as is inference.also_serves.second.api_key",
        ),
    ],
)
def test_a_server_with_a_key_has_another_one_for_each_guest(guests: str, says: str):
    keyed = [LORA, "inference.api_key=env:A"]
    given = "inference.also_serves={second: {api_key: env:B}, third: {api_key: env:C}}"
    assert run_file.load(QUICKSTART, [*keyed, given])
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [*keyed, f"inference.also_serves={guests}"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "envs.copy-digits.pool=generatin",
            (
                r"envs.copy-digits.pool: inference.pools has no 'generatin'; did you mean"
                r" 'generation'\?"
            ),
        ),
        (
            "inference.pools={generation: {}}",
            "the servers of pool generation are inference.replicas",
        ),
        ("inference.pools={Eval: {}}", "inference.pools.Eval: not a name"),
        (
            "eval.envs.held={}",
            (
                "eval.envs.held: 'held' is not one of the envs: copy-digits, add-digits; name one"
                " with `env`"
            ),
        ),
        (
            "eval.envs.copy-digits={samples: 4, k: [1, 8]}",
            "k is \\[1, 8\\], each at most samples, 4",
        ),
        (
            "inference.engine={trust_remote_code: true}",
            "inference.engine: trust_remote_code: not a setting that a run file passes on",
        ),
        (
            "inference.engine={gpu_memory_utilisation: 0.8}",
            "did you mean 'gpu_memory_utilization'?",
        ),
        (
            "inference.engine={attention_backend: /tmp/mine.py}",
            "inference.engine: attention_backend: '/tmp/mine.py' is not a name",
        ),
        (
            "inference.engine={block_size: large}",
            "inference.engine: block_size: 'large' is not a number",
        ),
        (
            "inference.engine={enforce_eager: 1}",
            "inference.engine: enforce_eager: 1 is neither true nor false",
        ),
        (
            "inference={pools: {judges: {engine: {quantization: mine.Method}}}}",
            "inference.pools.judges.engine: quantization: 'mine.Method' is not a name",
        ),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [override])
