"""What vLLM is started with, and what is said when it cannot be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.engine_settings import NUMBERS, SWITCHES, WORDS, problems
from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.serving import Inference
from streamrl.inference.servers.vllm_launch import (
    INSIDE,
    LIVES,
    Installation,
    Keys,
    VllmLaunch,
    address,
    check_vllm,
    find_vllm,
    run_keys,
)
from streamrl.system.errors import ConfigError, InferenceError

VLLM = Path(__file__).parents[3] / ".venv-inference" / "bin" / "python"
NONE = Keys("", {})
CPU = Installation("/env/bin/python", cuda=False)
GPU = Installation("/env/bin/python", cuda=True)


def launch(settings: Inference, **more: Any) -> VllmLaunch:
    return VllmLaunch(settings, Path("/models/7"), Path("/log"), **more)


def run_file(**inference: object) -> RunFile:
    settings = {"learner": {"lora": {}}, "inference": inference}
    return parse({"run": "r", "envs": {"e": {}}, **settings})


def test_the_command_line():
    settings = Inference(max_model_len=64, max_num_seqs=32, extra_args=["--block-size", "32"])
    line = launch(settings, index=2, life=7).command(CPU, "127.0.0.1", 8000)
    text = " ".join(line)
    assert line[0] == "/env/bin/python"
    for part in (
        (
            "--model /models/7 --load-format safetensors --served-model-name policy --host"
            " 127.0.0.1 --port 8000"
        ),
        "--dtype float32 --max-model-len 64 --max-num-seqs 32",
        "--logprobs-mode processed_logprobs --generation-config vllm --seed 7002",
        "--enable-scale-out --enforce-eager --block-size 32",
    ):
        assert part in text
    assert "--enforce-eager" not in launch(settings).command(GPU, "127.0.0.1", 8000)
    adapters = launch(settings, adapter_arguments=["--enable-lora"])
    assert adapters.command(CPU, "127.0.0.1", 8000)[-1] == "--enable-lora"
    assert adapters.environment(CPU, NONE, {})["STREAMRL_ADAPTERS"] == "1"


def test_a_server_of_a_pool_is_started_with_the_settings_of_its_pool():
    inference = {
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "engine": {"block_size": 32, "enable_dbo": True},
        "pools": {
            "judges": {
                "dtype": "half",
                "max_num_seqs": 8,
                "max_model_len": 4096,
                "tensor_parallel": 2,
                "engine": {"block_size": 64},
            }
        },
    }
    settings = run_file(**inference).of_pool("judges").inference
    text = " ".join(launch(settings).command(GPU, "127.0.0.1", 8000))
    assert "--dtype half --max-model-len 4096 --max-num-seqs 8" in text
    assert "--tensor-parallel-size 2 --block-size 64 --enable-dbo" in text


def test_each_life_of_each_server_has_a_seed_of_its_own():
    lives = [launch(Inference(), index=index) for index in (0, 0, 0, 1, 2)]
    assert len({life.seed for life in lives}) == 5
    assert [life.seed % 1_000 for life in lives] == [0, 0, 0, 1, 2]
    line = lives[0].command(CPU, "127.0.0.1", 8000)
    assert line[line.index("--seed") + 1] == str(lives[0].seed)
    assert launch(Inference(), index=999, life=LIVES - 1).seed < 2**31


CHECKED = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.tool_parsers import ToolParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = []
parser = make_arg_parser(FlexibleArgumentParser())
for line in json.load(sys.stdin):
    parsed = parser.parse_args(line)
    validate_parsed_serve_args(parsed)
    assert parsed.tool_call_parser in [None, *ToolParserManager.list_registered()]
    assert parsed.reasoning_parser in ["", *ReasoningParserManager.list_registered()]
    found.append({name: str(value) for name, value in vars(parsed).items()})
print(json.dumps(found))
"""
VALUES = {
    "gpu_memory_utilization": 0.8,
    "all2all_backend": "deepep_low_latency",
    "attention_backend": "FLASH_ATTN",
    "kv_cache_dtype": "fp8",
    "linear_backend": "cutlass",
    "moe_backend": "triton",
    "optimization_level": "2",
    "performance_mode": "throughput",
    "quantization": "fp8",
    "reasoning_parser": "qwen3",
    "safetensors_load_strategy": "prefetch",
    "scheduling_policy": "priority",
    "tool_call_parser": "hermes",
}


def test_vllms_own_parser_takes_every_setting():
    engine = {**dict.fromkeys(SWITCHES, True), **dict.fromkeys(NUMBERS, 2), **VALUES}
    assert {*VALUES} >= {*WORDS} and list(problems(engine)) == []
    full = Inference(tensor_parallel=2, engine=engine)
    off = Inference(engine=dict.fromkeys(SWITCHES, False))
    lines = list[list[str]]()
    for settings in (full, off):
        line = launch(settings, name="judges").command(GPU, "127.0.0.1", 8000)
        lines.append(line[line.index("--model") :])
    answer = subprocess.run(
        [VLLM, "-I", "-c", CHECKED], input=json.dumps(lines), capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr[-2_000:]
    first, second = json.loads(answer.stdout.splitlines()[-1])
    taken = {name: first[name].removesuffix(".0") for name in engine}
    assert taken.pop("attention_backend").endswith("FLASH_ATTN")
    assert taken == {name: str(engine[name]) for name in taken}
    assert first["served_model_name"] in ("judges", "['judges']")
    assert (first["enable_auto_tool_choice"], first["tensor_parallel_size"]) == ("True", "2")
    assert all(second[name] == "False" for name in SWITCHES)


WISHES = {"PATH": "/bin", "OMP_WAIT_POLICY": "active", "STREAMRL_NAP_S": "0", "HF_HUB_OFFLINE": "0"}


def test_the_environment():
    on_cpu = launch(Inference()).environment(CPU, NONE, WISHES, cores=4)
    assert (
        on_cpu["VLLM_SERVER_DEV_MODE"] == "1"
        and on_cpu["HF_HUB_OFFLINE"] == "1"
        and on_cpu["VLLM_CPU_KVCACHE_SPACE"] == "1"
    )
    assert (
        on_cpu["OMP_NUM_THREADS"] == "2"
        and on_cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        and on_cpu["PATH"] == "/bin"
    )
    # the user's own wish
    assert on_cpu["OMP_WAIT_POLICY"] == "active" and on_cpu["STREAMRL_NAP_S"] == "0"
    unasked = launch(Inference()).environment(CPU, NONE, {})
    assert float(unasked["STREAMRL_NAP_S"]) > 0 and unasked["STREAMRL_FORK"] == "1"
    # s: clients drop an idle connection long before
    assert float(on_cpu["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) >= 10 * 5.0
    assert not any(
        any(word in name for word in ("CPU", "OMP", "NAP", "FORK"))
        for name in launch(Inference()).environment(GPU, NONE, {})
    )


def test_keys_are_in_the_environment_and_not_in_the_command_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_TEST_KEY", "hunter2")
    settings = Inference(api_key="env:STREAMRL_TEST_KEY")
    keys = run_keys(run_file(api_key="env:STREAMRL_TEST_KEY"))
    line = launch(settings, run_keys=keys).command(GPU, "127.0.0.1", 8000)
    given = launch(settings).environment(
        GPU,
        Keys("the agent's", keys),
        {"PYTHONPATH": "/mine", "VLLM_API_KEY": "x"},
    )
    assert line[line.index("--middleware") + 1] == "streamrl_guard.Guard" and not any(
        "hunter2" in word for word in line
    )
    assert given["STREAMRL_AGENT_KEY"] == "the agent's"
    assert json.loads(given["STREAMRL_RUN_KEYS"]) == {"r": "hunter2"}
    assert given["STREAMRL_MAX_SAMPLES"] == str(settings.max_num_seqs)
    more = launch(settings, max_samples=1_000).environment(GPU, NONE, {})
    assert more["STREAMRL_MAX_SAMPLES"] == "1000"
    assert "VLLM_API_KEY" not in given, "vLLM's own check knows one key only, and guards less"
    assert given["PYTHONPATH"] == f"{INSIDE}{os.pathsep}/mine"
    there = sorted(path.name for path in INSIDE.glob("*.*"))
    assert there == [
        "streamrl_adapters-1.dist-info",
        "streamrl_adapters.py",
        "streamrl_forking-1.dist-info",
        "streamrl_forking.py",
        "streamrl_guard.py",
        "streamrl_probing-1.dist-info",
        "streamrl_probing.py",
        "streamrl_waiting-1.dist-info",
        "streamrl_waiting.py",
    ], "nothing there is to shadow a module of vLLM's"


def test_a_key_that_vllm_would_have_taken_is_not_silently_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    with pytest.raises(
        ConfigError, match="VLLM_API_KEY is set, but .*: write env:VLLM_API_KEY there, or unset it"
    ):
        run_keys(run_file())
    assert run_keys(run_file(api_key="env:VLLM_API_KEY")) == {"r": "hunter2"}


def test_each_run_has_its_own_key_at_the_servers(monkeypatch: pytest.MonkeyPatch):
    guests = {"second": {"api_key": "env:SECOND"}, "third": {"api_key": "env:THIRD"}}
    run = run_file(api_key="env:OWN", also_serves=guests)
    for name in ("OWN", "SECOND", "THIRD"):
        monkeypatch.setenv(name, f"key-{name}")
    assert run_keys(run) == {"r": "key-OWN", "second": "key-SECOND", "third": "key-THIRD"}
    assert run_keys(run.without_guests()) == {"r": "key-OWN"}
    assert run_keys(run_file(also_serves={"second": {}})) == {}
    monkeypatch.setenv("THIRD", "key-SECOND")
    with pytest.raises(ConfigError, match=r"third.api_key: run second has the same key"):
        run_keys(run)
    monkeypatch.delenv("THIRD")
    with pytest.raises(ConfigError, match=r"third.api_key is env:THIRD, but .* is not set"):
        run_keys(run)


def test_the_brokers_credentials_are_not_handed_on():
    base = {
        "STREAMRL_KAFKA": "{sasl.password: hunter2}",
        "STREAMRL_KAFKA_PASSWORD": "hunter2",
        "STREAMRL_HOME": "/h",
    }
    base |= {
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "WANDB_API_KEY": "hunter2",
        "MY_SASL_PASSWORD": "hunter2",
    }
    for installation in (CPU, GPU):
        given = launch(Inference()).environment(installation, NONE, base)
        assert (
            not any("hunter2" in value for value in given.values())
            and given["STREAMRL_HOME"] == "/h"
        )


def test_servers_bind_loopback_unless_told_otherwise_and_then_with_a_key_only(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("STREAMRL_TEST_HOST", "10.1.2.3")
    monkeypatch.setenv("STREAMRL_TEST_KEY", "hunter2")
    monkeypatch.setenv("STREAMRL_TEST_ANY", "0.0.0.0")
    key = {"api_key": "env:STREAMRL_TEST_KEY"}
    assert address(run_file().inference) == "127.0.0.1" and run_keys(run_file()) == {}
    assert address(run_file(host="::1").inference) == "::1"
    assert address(run_file(host="env:STREAMRL_TEST_HOST", **key).inference) == "10.1.2.3"
    for host in ("10.1.2.3", "0.0.0.0", "env:STREAMRL_TEST_HOST"):
        with pytest.raises(
            ConfigError,
            match=(
                f"inference.host {host} can be reached from other machines: set inference.api_key"
            ),
        ):
            run_file(host=host)
    for host in ("0.0.0.0", "::", "env:STREAMRL_TEST_ANY"):
        with pytest.raises(ConfigError, match="which envs cannot call"):
            address(run_file(host=host, **key).inference)
    with pytest.raises(
        ConfigError,
        match="inference.api_key is env:NOT_SET, but the environment variable 'NOT_SET' is not set",
    ):
        check_vllm(run_file(api_key="env:NOT_SET", python=str(VLLM)))


def test_a_python_without_vllm_or_none_at_all():
    with pytest.raises(InferenceError, match="has no vllm; run `make setup`"):
        find_vllm(Inference(python=sys.executable))
    with pytest.raises(InferenceError, match="does not run.*No such file"):
        find_vllm(Inference(python="/nowhere/python"))
