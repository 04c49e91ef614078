"""The model's head: from hidden states to the logprobs of the next tokens, some tokens at a time.

The logits of a row of 32,768 tokens under a vocabulary of 151,936 are 18.5 GiB, and the backward
pass needs them several times. In chunks, only the logits of one chunk exist at a time; the backward
pass computes them again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Predictions(NamedTuple):
    """The model's predictions of each next token. Both arrays are (rows, max_seq_len) float32, and
    position i is about token i + 1 of its segment.
    """

    logprobs: jax.Array
    entropy: jax.Array  # nats, of the whole distribution


def from_logits(logits: jax.Array, targets: jax.Array, temperatures: jax.Array) -> Predictions:
    """Logprobs of the targets under softmax(logits / temperature), and its entropy.

    `logits`: (rows, tokens, vocabulary) float32; `targets`: (rows, tokens) int32; `temperatures`:
    (rows, tokens) float32.
    """
    log_softmax = jax.nn.log_softmax(logits / temperatures[..., None], axis=-1)
    chosen = jnp.take_along_axis(log_softmax, targets[..., None], axis=-1)[..., 0]
    return Predictions(chosen, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1))


def soft_cap(logits: jax.Array, bound: float | None) -> jax.Array:
    """bound * tanh(logits / bound), or the logits themselves without a bound: Gemma 2 and 3."""
    return jnp.tanh(logits / bound) * bound if bound else logits


def in_chunks(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperatures: jax.Array,
    chunk: int,
    bound: float | None = None,
) -> Predictions:
    """`from_logits` of soft_cap(hidden @ head), computed so that only the logits of `chunk` tokens
    of each row exist at a time.

    `hidden`: (rows, tokens, width) in the format that the model computes in; `head`: (width,
    vocabulary). Products are summed in float32, and so is the head's gradient over the chunks.
    """
    tokens = hidden.shape[1]
    count = -(-tokens // chunk)
    head = head.astype(jnp.float32)

    def cut(array: jax.Array) -> jax.Array:
        """(rows, tokens, ...) to (count, rows, chunk, ...), filled up with ones."""
        filling = [(0, 0), (0, count * chunk - tokens)] + [(0, 0)] * (array.ndim - 2)
        filled = jnp.pad(array, filling, constant_values=1)
        parts = filled.reshape(array.shape[0], count, chunk, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    def join(parts: jax.Array) -> jax.Array:
        return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], count * chunk)[:, :tokens]

    @jax.checkpoint
    def of_chunk(head: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> Predictions:
        states, wanted, divisors = part
        logits = jnp.einsum(
            "rte,ev->rtv",
            states,
            head.astype(states.dtype),
            preferred_element_type=jnp.float32,
        )
        return from_logits(soft_cap(logits, bound), wanted, divisors)

    parts = (cut(hidden), cut(targets), cut(temperatures))
    predictions = jax.lax.map(lambda part: of_chunk(head, part), parts)
    return Predictions(join(predictions.logprobs), join(predictions.entropy))
