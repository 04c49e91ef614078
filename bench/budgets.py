"""How much memory the learner takes for real models, without a device that has it.

    python -m bench.budgets [NAME...]

The learner's own step, its reference logprobs and its export, as `streamrl/learner/memory.py`
compiles them. The exit code is 1 when a program takes more than it may. docs/performance.md has the
table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from streamrl.config.sections.learner import Learner
from streamrl.learner.memory import GIB, Memory, What, program_memory, use_virtual_devices

QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
# One part of all rows: no sum of gradients stands beside those of a part.
ONE_DEVICE: dict[str, Any] = {"logprob_chunk": 32, "micro_batch_rows": 6}
SAVING = {"precision": "bf16", "remat": "full", "logprob_chunk": 1_024, "micro_batch_rows": 1}


class Program(NamedTuple):
    """A program of the learner, and what it may take."""

    what: What
    model: str  # One of MODELS.
    tokens: int  # Tokens of a row.
    devices: int
    budget_gib: float  # On each device: arguments, results and temporary values.
    mesh: Mapping[str, Any] = MappingProxyType({})  # As learner.mesh.
    settings: Mapping[str, Any] = MappingProxyType({})  # Further settings of the learner.
    rows: int = 2  # Of each device, or each group of devices that has rows of its own.


PROGRAMS = {
    "tiny": Program("reference", "tiny", 4_096, 1, 0.5, settings={"logprob_chunk": 128}),
    "small": Program("step", "qwen3-0.6b", 2_048, 8, 8),
    "one-device": Program(
        "step", "qwen3-0.6b", 256, 1, 14, settings=ONE_DEVICE, rows=ONE_DEVICE["micro_batch_rows"]
    ),
    "one-float32": Program(
        "step",
        "qwen3-0.6b",
        256,
        1,
        12,
        settings={**ONE_DEVICE, "precision": "float32"},
        rows=ONE_DEVICE["micro_batch_rows"],
    ),
    # deploy/runs/gsm8k-1gpu.yaml: 60 % of 24 GiB.
    "one-gpu": Program(
        "step", "qwen3-0.6b", 1_024, 1, 14.3, settings={"logprob_chunk": 256, "micro_batch_rows": 1}
    ),
    # deploy/runs/qwen3-8b-8xh100.yaml: 92 % of the 79.6 GiB of an H100.
    "node": Program("step", "qwen3-8b", 32_768, 4, 73, settings={"logprob_chunk": 512}),
    "step": Program("step", "qwen3-8b", 32_768, 8, 50),
    "reference": Program("reference", "qwen3-8b", 32_768, 8, 20),
    "export": Program("export", "qwen3-8b", 32_768, 8, 8),
    "mixture": Program("step", "qwen3-30b-a3b", 32_768, 64, 50, mesh={"nodes": "divide"}),
}


def measure(program: Program) -> Memory:
    """Compile the program. It needs as many devices as it is for."""
    from streamrl.learner.parallel.mesh import data_parallel_devices

    settings = Learner.model_validate({**SAVING, **program.settings, "mesh": dict(program.mesh)})
    rows = program.rows * data_parallel_devices(settings)
    return program_memory(program.what, MODELS[program.model], settings, rows, program.tokens)


def in_subprocess(name: str) -> Memory:
    """Measure in a process of its own, which has the devices. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.budgets", "--one", name],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Memory(*json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        use_virtual_devices(PROGRAMS[options.one].devices)
        print(json.dumps(measure(PROGRAMS[options.one])))
        return 0
    sizes = "arguments temporary   results     sum  budget"
    print(f"{'GiB':12} {'model':14}  tokens devices mesh     {sizes}      s")
    failed = [name for name in options.names or PROGRAMS if not is_within_budget(name)]
    return min(len(failed), 1)


def is_within_budget(name: str) -> bool:
    """Measure the program and print its row. False if it takes more than it may."""
    program = PROGRAMS[name]
    started = time.monotonic()
    memory = in_subprocess(name)
    mesh = ",".join(f"{axis}={size}" for axis, size in program.mesh.items())
    sizes = " ".join(f"{size / GIB:9.1f}" for size in memory)
    print(
        f"{name:12} {program.model:14} {program.tokens:7} {program.devices:7} {mesh:8} {sizes}"
        f" {memory.gib:7.1f} {program.budget_gib:7.1f} {time.monotonic() - started:6.0f}",
        flush=True,
    )
    if memory.gib > program.budget_gib:
        print(f"{name} misses its budget", flush=True)
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
