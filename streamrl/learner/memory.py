"""The memory that the learner's programs take on each device, without a device that has it.

    python -m streamrl.learner.memory < RUN.json

The programs are compiled ahead of time for virtual CPU devices. Nothing is allocated: XLA shows how
many bytes each device would hold.

XLA assigns buffers for a GPU in another way. Its CPU back end computes bfloat16 in float32, so some
of what is bfloat16 is counted with six bytes a value.

A CPU multiplies every token with every expert of a mixture, which a GPU's kernel does not. Here all
experts get as many tokens, and each is multiplied with its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal, NamedTuple, cast
from unittest.mock import patch

from streamrl.config.run_file import RunFile, parse_resolved
from streamrl.config.sections.learner import Learner

GIB = 1 << 30
FLAGS = (
    # Machine code is never run, so it need not be good.
    "--xla_backend_optimization_level=0"
    # The CPU back end slices bfloat16 in float32. This pass would move the conversion out of the
    # loop over the layers, and so widen the inputs of all layers at once. A GPU slices bfloat16.
    " --xla_disable_hlo_passes=while-loop-invariant-code-motion"
)
What = Literal["step", "reference", "export"]


class Memory(NamedTuple):
    """Bytes that each device holds."""

    arguments: int
    temporary: int
    results: int  # Without those that take the place of arguments.

    @property
    def gib(self) -> float:
        return sum(self) / GIB


def use_virtual_devices(count: int) -> None:
    """Let JAX see so many devices, which compute nothing. Call this before JAX is used."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count} {FLAGS}"


def program_memory(
    what: What,
    model_config: dict[str, Any],
    settings: Learner,
    rows: int,
    tokens: int,
    weights_dtype: str = "bfloat16",
) -> Memory:
    """The memory of a program: a step of training, the logprobs of a reference, or the copy of the
    weights that is exported.

    `model_config`: a Hugging Face config.json. `rows`: of `tokens` each, of all devices.
    `weights_dtype`: that weights are exported in.
    """
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from haliax import Axis, NamedArray
    from jax.sharding import NamedSharding, PartitionSpec
    from levanter.trainer_state import TrainerState

    from streamrl.learner import adapters
    from streamrl.learner.files import export
    from streamrl.learner.model import experts, model
    from streamrl.learner.model.examples import empty_example
    from streamrl.learner.model.families import levanter_config, to_transformers_v4
    from streamrl.learner.update import Updater

    updater = Updater(settings, rows, tokens)
    trainer = updater.trainer
    found = to_transformers_v4(model_config)
    config = levanter_config(found, tokens, **model.compute_options(settings))

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
        built: Any = config.build(Axis("vocab", found.vocab_size), key=jax.random.PRNGKey(0))
        return adapters.attach(built, settings.lora, 0) if settings.lora else built

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
        if what == "export":
            dtype = jnp.dtype(weights_dtype)
            return compiled(export.named_tensors, place(shapes, parameters), None, dtype)
        example = jax.tree.map(
            lambda array: NamedArray(
                cast(Any, jax.ShapeDtypeStruct(array.shape, array.dtype)),
                (model.BATCH, model.POSITION),
            ),
            empty_example(rows, tokens),
        )
        inputs = place(example, trainer.compute_axis_mapping)
        if what == "reference":
            half = eqx.filter_eval_shape(
                lambda: model.compute_policy(settings.precision).cast_to_compute(made())
            )
            return compiled(updater.sharded_logprobs, place(half, parameters), inputs)
        state = eqx.filter_eval_shape(
            lambda: TrainerState.init(
                trainer.optimizer,
                made(),
                key=jax.random.PRNGKey(0),
                mp=trainer.mp,
                is_trainable=adapters.is_trainable(shapes),
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


def learner_memory(run: RunFile, model_config: dict[str, Any]) -> float:
    """The most GiB that each device of the learner holds: at a step, or while a version is exported
    in addition to the state.
    """
    settings = run.learner
    rows = run.batcher.rows
    tokens = run.batcher.max_seq_len
    step = program_memory("step", model_config, settings, rows, tokens)
    most = sum(step)
    if not settings.lora:  # adapters are small
        dtype = run.inference.weights_dtype
        export = program_memory("export", model_config, settings, rows, tokens, dtype)
        most = max(most, step.arguments + export.temporary + export.results)
    if settings.reference and settings.reference.by == "learner":
        most += program_memory("reference", model_config, settings, rows, tokens).arguments
    return most / GIB


def main() -> None:
    """Print the memory of the learner that the input describes: a run, the config.json of its
    model, and the number of its devices.
    """
    asked = json.load(sys.stdin)
    use_virtual_devices(asked["devices"])
    print(learner_memory(parse_resolved(asked["run"], "run"), asked["config"]))


if __name__ == "__main__":
    main()
