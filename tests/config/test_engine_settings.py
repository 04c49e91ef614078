"""What a run file passes on to vLLM's engine by name."""

from __future__ import annotations

from streamrl.config.engine_settings import NUMBERS, SWITCHES, WORDS, arguments, problems
from streamrl.config.run_file import parse
from streamrl.config.topology import parts, pool_of


def test_settings_become_arguments():
    engine = {"enforce_eager": True, "enable_prefix_caching": False, "gpu_memory_utilization": 0.8}
    assert list(problems(engine)) == []
    assert arguments(engine) == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.8",
    ]


def test_no_setting_loads_code():
    names = {*SWITCHES, *NUMBERS, *WORDS}
    assert not any(
        part in name
        for name in names
        for part in ("plugin", "remote", "cls", "path", "config", "tokenizer", "executor", "model")
    )
    for value in ("/tmp/mine.py", "mine:Backend", "mine.Backend", "http://host", "-x"):
        assert list(problems({"moe_backend": value})) == [f"moe_backend: {value!r} is not a name"]


def test_a_pool_has_its_own_settings_and_for_the_rest_those_of_all():
    run = parse(
        {
            "run": "r",
            "envs": {"copy-digits": {}},
            "inference": {
                "dtype": "bfloat16",
                "engine": {"block_size": 32, "enforce_eager": True},
                "pools": {
                    "judges": {
                        "model": "/models/judge",
                        "tensor_parallel": 8,
                        "engine": {"block_size": 64},
                    }
                },
            },
        }
    )
    assert run.of_pool("generation") == run
    judges = run.of_pool("judges").inference
    assert judges.dtype == "bfloat16" and judges.tensor_parallel == 8
    assert judges.engine == {"block_size": 64, "enforce_eager": True}
    assert judges.own_model("judges") == "/models/judge" and not judges.own_model("generation")
    served = {part.name: pool_of(part) for part in parts(run) if part.role == "inference"}
    assert served == {"inference-0": "generation", "inference-judges-0": "judges"}
