"""The head in chunks: what it gives is what the logits of the whole row give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from streamrl.learner.model.head import Predictions, from_logits, in_chunks, soft_cap

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 10, 8, 29
Predict = Callable[[Any, Any], Predictions]
random = np.random.default_rng(0)
HIDDEN = jnp.asarray(random.normal(size=(ROWS, TOKENS, WIDTH)), jnp.float32)
HEAD = jnp.asarray(random.normal(size=(WIDTH, VOCABULARY)), jnp.float32)
TARGETS = jnp.asarray(random.integers(0, VOCABULARY, (ROWS, TOKENS)), jnp.int32)
TEMPERATURES = jnp.asarray(random.uniform(0.5, 2, (ROWS, TOKENS)), jnp.float32)
WEIGHTS = jnp.asarray(random.normal(size=(2, ROWS, TOKENS)), jnp.float32)


def dense(bound: float | None) -> Predict:
    return lambda hidden, head: from_logits(soft_cap(hidden @ head, bound), TARGETS, TEMPERATURES)


def chunked(chunk: int, bound: float | None) -> Predict:
    return lambda hidden, head: in_chunks(hidden, head, TARGETS, TEMPERATURES, chunk, bound)


def gradient(predict: Predict) -> tuple[Any, Any]:
    """Of a weighted sum of both results, by the hidden states and the head."""

    def total(hidden: Any, head: Any) -> Any:
        found = predict(hidden, head)
        return jnp.sum(WEIGHTS[0] * found.logprobs) + jnp.sum(WEIGHTS[1] * found.entropy)

    return jax.jit(jax.grad(total, (0, 1)))(HIDDEN, HEAD)


def largest(function: Callable[..., Any], *arguments: Any) -> int:
    """The number of elements of the largest array that a function makes, in its loops too."""

    def arrays(jaxpr: Any) -> Any:
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from arrays(inner)

    return max(arrays(jax.make_jaxpr(function)(*arguments).jaxpr))


@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 5, 10])
def test_chunks_are_the_whole_row(chunk: int, bound: float | None):
    """Also where the chunk does not divide the row: 4 of 10 tokens."""
    found = jax.jit(chunked(chunk, bound))(HIDDEN, HEAD)
    wanted = dense(bound)(HIDDEN, HEAD)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.entropy, wanted.entropy, atol=1e-5)
    for ours, theirs in zip(gradient(chunked(chunk, bound)), gradient(dense(bound)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_no_logits_of_a_whole_row_exist():
    """Neither forwards nor backwards. The gradient of the whole row has them."""
    whole = ROWS * TOKENS * VOCABULARY
    assert largest(lambda: gradient(dense(None))) >= whole
    assert largest(lambda: gradient(chunked(2, None))) < whole


def test_bfloat16_is_close_and_sums_in_float32():
    half = HIDDEN.astype(jnp.bfloat16)
    found = jax.jit(chunked(4, None))(half, HEAD.astype(jnp.bfloat16))
    assert found.logprobs.dtype == found.entropy.dtype == jnp.float32
    wanted = dense(None)(HIDDEN, HEAD)
    assert 0 < np.abs(found.logprobs - wanted.logprobs).max() < 0.1
