"""Every run file of deploy/runs can be run, and those for GPUs say what their devices can hold."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from bench.budgets import MODELS, PROGRAMS, SAVING
from streamrl.config import run_file, topology
from streamrl.config.addresses import is_loopback
from streamrl.config.run_file import RunFile
from streamrl.run.orchestrator.placement import VISIBLE, device_variables
from streamrl.run.orchestrator.preview import age_of_longest, cache_bytes, padding, preview

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "deploy" / "runs"
H100_GIB = 79.6
# The program that is compiled for the learner, the machine's GiB a GPU, its model.
GPU_RUNS = {
    "gsm8k-1gpu": ("one-gpu", 24.0, "qwen3-0.6b"),
    "qwen3-8b-8xh100": ("node", H100_GIB, "qwen3-8b"),
    "qwen3-8b-2x8xh100": ("step", H100_GIB, "qwen3-8b"),
    "qwen3-30b-a3b": ("mixture", H100_GIB, "qwen3-30b-a3b"),
}
SEVERAL_NODES = ("qwen3-8b-2x8xh100", "qwen3-30b-a3b")


def loaded(name: str) -> RunFile:
    return run_file.load(RUNS / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_run_file_is_valid(path: Path):
    assert run_file.load(path).envs


@pytest.mark.parametrize("name", GPU_RUNS)
def test_a_gpu_run_trains_what_a_budget_is_for_and_the_budget_is_its_share(name: str):
    program, gpu_gib, model = GPU_RUNS[name]
    budget = PROGRAMS[program]
    run = loaded(name)
    [learner, *_] = topology.parts(run)
    assert (budget.model, budget.tokens) == (model, run.batcher.max_seq_len)
    assert run.batcher.processes == budget.devices
    assert dict(budget.mesh) == run.learner.mesh.model_dump(exclude_defaults=True)
    wanted = {**SAVING, **budget.settings}
    assert {key: getattr(run.learner, key) for key in wanted} == wanted
    assert budget.budget_gib <= topology.memory_fraction(run, learner) * gpu_gib
    if run.model.hidden:
        assert run.model.hidden == MODELS[model]["hidden_size"]


@pytest.mark.parametrize("name", GPU_RUNS)
def test_rows_of_a_gpu_run_are_full_and_its_long_answers_train(name: str):
    """Padding costs as much as tokens, and what expires is what took longest to sample."""
    run = loaded(name)
    assert padding(run) < 0.05
    assert run.batcher.rows % run.batcher.processes == 0
    assert age_of_longest(run) <= run.buffer.max_age
    [env] = run.envs.values()
    assert env.max_tokens <= run.model.max_seq_len - 256  # of them the prompt


@pytest.mark.parametrize("name", GPU_RUNS)
def test_every_part_of_a_gpu_run_that_computes_has_its_devices(name: str):
    """Each device of a machine has one learner or one server; the only GPU has both, and a tenth of
    its memory is left for CUDA.
    """
    run = loaded(name)
    users = [part for part in topology.parts(run) if topology.uses_gpu(part)]
    held = topology.reserved_memory(run)
    assert {part.name for part in users} == {part for parts in held.values() for part in parts}
    for device, parts in held.items():
        assert len(parts) == (2 if name == "gsm8k-1gpu" else 1), device
        assert sum(parts.values()) <= 0.93
    learners = [part for part in users if part.role == "learner"]
    devices = [device for part in learners for device in topology.devices_of(run, part)]
    assert len(devices) == run.batcher.processes
    for part in users:
        variables = device_variables(run, part, [str(number) for number in range(8)])
        count = len(variables[VISIBLE].split(","))
        assert count == (
            run.inference.tensor_parallel
            if topology.is_server(part)
            else run.batcher.processes // run.learner.processes
        )


# Of each model, its parameters, the GiB that vLLM computes in, and the tokens of a usual rollout.
SERVED = {
    "qwen3-0.6b": (0.6e9, 1, 350),
    "qwen3-8b": (8.2e9, 4, 2_048),
    "qwen3-30b-a3b": (30.5e9, 4, 2_048),
}


@pytest.mark.parametrize("name", GPU_RUNS)
def test_the_servers_of_a_gpu_run_have_a_cache_for_all_their_sequences(name: str):
    _, gpu_gib, model = GPU_RUNS[name]
    parameters, computing_gib, usual = SERVED[model]
    run = loaded(name)
    [fraction] = {
        topology.memory_fraction(run, part)
        for part in topology.parts(run)
        if topology.is_server(part)
    }
    split = run.inference.tensor_parallel
    weights_gib = parameters * 2 / (1 << 30) / split
    cache = (fraction * gpu_gib - weights_gib - computing_gib) * (1 << 30)
    tokens = cache / (cache_bytes(MODELS[model]) / split)
    assert tokens >= usual * run.inference.max_num_seqs


@pytest.mark.parametrize("name", SEVERAL_NODES)
def test_a_run_on_several_machines_is_reached_from_all(name: str):
    run = loaded(name)
    assert not is_loopback(run.inference.host) and run.inference.api_key.startswith("env:")
    assert run.inference.port and run.weights.store.startswith("/shared")
    text = (RUNS / f"{name}.yaml").read_text()
    commands = [line for line in text.splitlines() if line.startswith("#   streamrl up")]
    assert any("--except inference" in line for line in commands)
    served = set[str]()
    for line in commands:
        words = line.partition("    #")[0].split()
        only = [word for flag, word in pairwise(words) if flag == "--only"]
        out = [word for flag, word in pairwise(words) if flag == "--except"]
        chosen = topology.chosen_parts(run, only, out)
        nodes = {device.node for part in chosen for device in topology.devices_of(run, part)}
        assert len(nodes) <= 1
        served |= {part.name for part in chosen if topology.is_server(part)}
    assert "inference-0" in served


def test_the_check_of_a_gpu_run_names_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the model's shape here, and a GPU of 24 GiB that only `nvidia-smi` knows."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-0.6b"]))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '24576, 580.82.07, NVIDIA L4'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = run_file.load(RUNS / "gsm8k-1gpu.yaml", [f"model.path={tmp_path}"])
    facts = [fact.text for fact in preview(run) if fact.subject == "device"]
    assert facts == ["0: learner reserves 60% (14.4 GiB), inference-0 reserves 30% (7.2 GiB)"]
