"""The gradient of one batch, by the real trainer: here, or as a program on several devices or as
one of several JAX processes.

python -m tests.learner.gradients MODEL OUT [MICRO_BATCH_ROWS [COORDINATOR PROCESSES PROCESS]]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from msgspec import structs
from safetensors.numpy import save_file

from streamrl.batcher.assemble import Sharding, assemble
from streamrl.config.sections.learner import Kl, Learner
from streamrl.learner.model import model
from streamrl.learner.model.examples import RlExample, expand
from tests.learner.examples import Segment, example
from tests.learner.updaters import shared_updater
from tests.support.build import group

CONTEXT = 32
ROWS = 4


def batch() -> RlExample:
    """Six rollouts of one to eleven sampled tokens in four rows of 16; no two rows have as many of
    either.
    """
    draws = np.random.default_rng(0)

    def segment(prompt: int, sampled: int) -> Segment:
        tokens = draws.integers(4, 16, prompt + sampled).tolist()
        return Segment(
            tokens,
            prompt,
            float(draws.normal()),
            draws.normal(-2.7, 0.4, sampled).tolist(),
            float(draws.choice([0.7, 1.0])),
        )

    rows = [[(2, 3), (1, 5)], [(3, 11)], [(4, 1), (2, 2), (1, 6)], []]
    return example([[segment(*sizes) for sizes in row] for row in rows], 16)


def divided(division: Sharding) -> RlExample:
    """Four groups of three rollouts in four rows, as the batcher divides them."""
    draws = np.random.default_rng(1)
    groups = [group(name=f"g{i}", sizes=draws.integers(1, 9, 3).tolist()) for i in range(4)]
    # to a model of 16 tokens
    known = [structs.replace(g, tokens=4 + g.tokens % 12) for g in groups]
    made = assemble(known, 0, 0, ROWS, CONTEXT, division)
    assert made is not None
    return expand(made)


def gradient(
    directory: Path,
    micro_batch_rows: int = 0,
    taken: RlExample | None = None,
    look: Callable[[Any], None] = lambda state: None,
    **compute: Any,
) -> dict[str, np.ndarray]:
    """The gradient of the loss of docs/design/grpo.md, with the divergence from another policy.

    It is what Adam keeps of each parameter's first step when it forgets at once. `look` is called
    with the state after that step. `compute`: further settings of the learner.
    """
    settings = Learner(
        loss="grpo",
        kl=Kl(coefficient=0.1),
        normalize_advantages=False,
        micro_batch_rows=micro_batch_rows,
        beta1=0.0,
        max_grad_norm=1e9,
        warmup_steps=0,
        **compute,
    )
    updater = shared_updater(settings, ROWS, CONTEXT)
    with updater.training():
        reference = model.load(directory, CONTEXT, settings, frozen=True)
        # arrays of its own, too: the trainer takes them
        trained = jax.tree.map(lambda leaf: leaf * 1.05, model.load(directory, CONTEXT, settings))
        state, measured = updater.step(updater.initial_state(trained), reference, taken or batch())
        look(state)
        kept = cast(Any, state.opt_state)[2][0].mu
        found = {
            jax.tree_util.keystr(path): process_allgather(leaf, tiled=True)
            for path, leaf in jax.tree_util.tree_leaves_with_path(kept)
        }
        # one row, whatever the number of devices
        found["probe"] = updater.logprobs(reference, model.single_sequence(np.arange(4, 12)))
        return {
            **found,
            "loss": np.float32(measured["loss"]).reshape(1),
            "kl": np.float32(measured["kl"]).reshape(1),
        }


def main(
    directory: str,
    out: str,
    micro_batch_rows: str = "0",
    coordinator: str = "",
    processes: str = "1",
    process: str = "0",
) -> None:
    if coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(processes), int(process))
    found = gradient(Path(directory), int(micro_batch_rows))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in found.items()},
        out,
        {"devices": f"{jax.process_count()}x{jax.device_count()}"},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
