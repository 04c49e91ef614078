"""How much memory the learner takes for real models, without a device that has it.

    python -m bench.budgets [NAME...]

The learner's own step, its reference logprobs and its export are compiled ahead of time for virtual
CPU devices. Nothing is allocated: XLA says how many bytes each device would hold. The exit code is
1 when a program takes more than it may. docs/performance.md has the table.

XLA assigns buffers for a GPU in another way. Its CPU back end computes bfloat16 in float32, so some
of what is bfloat16 is counted with six bytes a value.

A CPU multiplies every token with every expert of a mixture, which a GPU's kernel does not. Here all
experts get as many tokens, and each is multiplied with its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast
from unittest.mock import patch

GIB = 1 << 30
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
FLAGS = (
    # Machine code is never run, so it need not be good.
    "--xla_backend_optimization_level=0"
    # The CPU back end slices bfloat16 in float32. This pass would move the conversion out of the
    # loop over the layers, and so widen the inputs of all layers at once. A GPU slices bfloat16.
    " --xla_disable_hlo_passes=while-loop-invariant-code-motion"
)
SAVING = {"precision": "bf16", "remat": "full", "logprob_chunk": 1_024, "micro_batch_rows": 1}


class Program(NamedTuple):
    """A program of the learner, and what it may take."""

    what: str  # step, reference or export
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
    "step": Program("step", "qwen3-8b", 32_768, 8, 50),
    "reference": Program("reference", "qwen3-8b", 32_768, 8, 20),
    "export": Program("export", "qwen3-8b", 32_768, 8, 10),
    "mixture": Program("step", "qwen3-30b-a3b", 32_768, 64, 50, mesh={"nodes": "divide"}),
}


class Memory(NamedTuple):
    """Bytes that each device holds."""

    arguments: int
    temporary: int
    results: int  # Without those that take the place of arguments.

    @property
    def gib(self) -> float:
        return sum(self) / GIB


def measure(program: Program) -> Memory:
    """Compile the program. It needs as many devices as it is for."""
    import equinox as eqx
    import haliax as hax
    import jax
    from haliax import Axis, NamedArray
    from jax.sharding import NamedSharding, PartitionSpec
    from levanter.trainer_state import TrainerState

    from streamrl.config.run_file import Learner
    from streamrl.learner.files import export
    from streamrl.learner.model import experts, model
    from streamrl.learner.model.examples import empty_example
    from streamrl.learner.model.families import levanter_config, to_transformers_v4
    from streamrl.learner.parallel.mesh import data_parallel_devices
    from streamrl.learner.update import Updater

    settings = Learner.model_validate({**SAVING, **program.settings, "mesh": dict(program.mesh)})
    rows = program.rows * data_parallel_devices(settings)
    updater = Updater(settings, rows, program.tokens)
    trainer = updater.trainer
    found = to_transformers_v4(MODELS[program.model])
    config = levanter_config(found, program.tokens, **model.compute_options(settings))

    def by_equal_stretches(rows: Any, weights: Any, sizes: Any) -> Any:
        stretches = rows.reshape(len(weights), -1, rows.shape[-1])
        return (stretches @ weights).reshape(len(rows), -1)

    def shaped(leaf: Any, spec: PartitionSpec) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(trainer.device_mesh, spec)
        )

    def place(tree: Any, mapping: Any) -> Any:
        """The shapes of a tree, on the devices where the mapping puts them."""

        def of_leaf(leaf: Any) -> Any:
            if isinstance(leaf, NamedArray):
                spec = hax.partitioning.pspec_for_axis(leaf.axes, mapping)
                return NamedArray(shaped(leaf.array, spec), leaf.axis_names)
            return shaped(leaf, PartitionSpec())

        return jax.tree.map(of_leaf, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))

    def made() -> Any:
        return config.build(Axis("vocab", found.vocab_size), key=jax.random.PRNGKey(0))

    def compiled(function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Memory:
        """The memory of the function. `donate`: arguments whose memory it may use."""
        is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
        dynamic, static = eqx.partition(arguments, is_shape)

        def call(*dynamic: Any) -> Any:
            with hax.axis_mapping(trainer.parameter_axis_mapping):
                return eqx.filter(function(*eqx.combine(dynamic, static)), eqx.is_array)

        lowered = jax.jit(call, donate_argnums=donate).lower(*dynamic)
        sizes: Any = lowered.compile().memory_analysis()
        return Memory(
            sizes.argument_size_in_bytes,
            sizes.temp_size_in_bytes,
            sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        )

    with updater.use_mesh(), patch.object(experts, "ragged_dot", by_equal_stretches):
        parameters = trainer.parameter_axis_mapping
        shapes = eqx.filter_eval_shape(made)
        if program.what == "export":
            return compiled(export.named_tensors, place(shapes, parameters))
        example = jax.tree.map(
            lambda array: NamedArray(
                cast(Any, jax.ShapeDtypeStruct(array.shape, array.dtype)),
                (model.BATCH, model.POSITION),
            ),
            empty_example(rows, program.tokens),
        )
        inputs = place(example, trainer.compute_axis_mapping)
        if program.what == "reference":
            half = eqx.filter_eval_shape(
                lambda: model.compute_policy(settings.precision).cast_to_compute(made())
            )
            return compiled(updater.sharded_logprobs, place(half, parameters), inputs)
        state = eqx.filter_eval_shape(
            lambda: TrainerState.init(
                trainer.optimizer, made(), key=jax.random.PRNGKey(0), mp=trainer.mp
            )
        )
        # What Levanter compiles for a step without hooks.
        step = cast(Any, trainer)._train_step
        return compiled(
            lambda state, batch: step(state, batch, {}, _no_hooks=True),
            place(state, parameters),
            ((inputs, inputs.advantages),),
            donate=(0,),
        )


def in_subprocess(name: str) -> Memory:
    """Measure in a process of its own, which has the devices. Raises CalledProcessError."""
    flags = f"--xla_force_host_platform_device_count={PROGRAMS[name].devices} {FLAGS}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-m", "bench.budgets", "--one", name],
        env=environment,
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
