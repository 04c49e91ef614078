"""The same policy trained by Levanter alone: its trainer, its model, PPO written out. Nothing of
streamrl is imported here, and nothing is to be.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import levanter.tracker
import numpy as np
import optax
from haliax import Axis
from levanter.layers.attention import AttentionMask
from levanter.tracker import NoopConfig, NoopTracker
from levanter.trainer import Trainer, TrainerConfig

CLIP = 0.2


class Rows(NamedTuple):
    """A batch in memory. All (rows, max_seq_len); position i speaks of the prediction of token i +
    1.
    """

    tokens: np.ndarray  # int32
    segments: np.ndarray  # int32; 0 is padding
    positions: np.ndarray  # int32, from 0 in each segment
    old_logprobs: np.ndarray  # float32
    # float32: divided by the tokens that train; 0 where nothing does
    weighted_advantages: np.ndarray


class Settings(NamedTuple):
    """Of AdamW, behind a clip of the global norm, with a linear warm-up."""

    learning_rate: float
    warmup_steps: int
    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float


def ppo(
    model: Any,
    tokens: Any,
    segments: Any,
    positions: Any,
    old: Any,
    weighted: Any,
    *,
    key: Any = None,
) -> jax.Array:
    """sum(-min(ratio * A, clip(ratio) * A) / T). PPO, arXiv:1707.06347, equation 7."""
    logits = model(
        tokens, attn_mask=AttentionMask.causal().with_segment_ids(segments), pos_ids=positions
    )
    logprobs = jax.nn.log_softmax(logits.rearrange(("batch", "position", "vocab")).array, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.roll(tokens.array, -1, axis=1)[..., None], axis=-1)[
        ..., 0
    ]
    ratio = jnp.exp(jnp.where(weighted.array != 0, chosen - old.array, 0.0))
    return -jnp.sum(
        jnp.minimum(ratio * weighted.array, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * weighted.array)
    )


class Plain:
    """A policy in training. To be used inside `training()`."""

    def __init__(self, rows: int, settings: Settings) -> None:
        warm_up = optax.linear_schedule(
            settings.learning_rate / max(settings.warmup_steps, 1),
            settings.learning_rate,
            settings.warmup_steps,
        )
        adamw = optax.adamw(
            warm_up, b1=settings.beta1, b2=settings.beta2, weight_decay=settings.weight_decay
        )
        config = TrainerConfig(
            id="plain",
            tracker=NoopConfig(),
            require_accelerator=False,
            mp=jmp.get_policy("f32"),
            train_batch_size=rows,
            per_device_parallelism=rows,
            num_train_steps=2**31 - 1,
            log_jaxprs=False,
            log_xla_hlo=False,
            load_checkpoint=False,
            crash_on_nan=False,
            crash_on_inf=False,
        )
        self._trainer = Trainer(
            config,
            optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw),
            ppo,
            add_default_hooks=False,
        )

    @contextmanager
    def training(self) -> Generator[None]:
        with self._trainer, levanter.tracker.current_tracker(NoopTracker()):
            yield

    def begin(self, model: Any) -> None:
        self.state = self._trainer.initial_state(jax.random.PRNGKey(0), model=model)

    def step(self, rows: Rows) -> float:
        """Train on one batch; its loss."""
        count, length = rows.tokens.shape
        axes = (Axis("batch", count), Axis("position", length))
        info = self._trainer.train_step(
            self.state, *(hax.named(jnp.asarray(array), axes) for array in rows)
        )
        self.state = info.state
        return float(info.loss)
