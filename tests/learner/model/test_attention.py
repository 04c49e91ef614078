# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamrl.config import run_file
from streamrl.config.sections.learner import Learner
from streamrl.learner.files import export
from streamrl.learner.model import attention, model
from streamrl.learner.model.attention import Heads
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system.errors import ConfigError
from tests.learner.conftest import CONTEXT
from tests.learner.examples import Segment, example

ROOT = Path(__file__).parents[3]
HEADS = Heads(kv_heads=2, queries=2, head_size=16, dtype="float32", scale=0.25)
ONE = Segment([1, 8, 11, 15, 8, 11, 2], 1)
TWO = Segment([1, 4, 5, 6, 7, 8, 9, 10, 11, 15, 4, 2], 1)


def test_the_pallas_kernel_interpreted_is_the_reference() -> None:
    difference, seen = attention.compare(attention.pallas, HEADS)
    assert difference < 1e-5
    assert seen == 0
    assert attention.compare(attention.reference, HEADS) == (0, 0)


@pytest.mark.parametrize("length", [40, 200])
def test_the_pallas_kernel_takes_rows_of_any_length(length: int) -> None:
    """Two segments and padding, in values and in gradients: `auto` takes the kernel for rows that
    are no multiple of its blocks.
    """
    segment_ids = np.zeros((1, length), np.int32)
    segment_ids[0, : length // 2] = 1
    segment_ids[0, length // 2 : length - 5] = 2
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    shape = (1, length, HEADS.kv_heads, HEADS.head_size)
    q = jax.random.normal(keys[0], (*shape[:3], HEADS.queries, HEADS.head_size))
    k = jax.random.normal(keys[1], shape)
    v = jax.random.normal(keys[2], shape)
    kept = jnp.asarray(segment_ids > 0)[..., None, None, None]

    def results(kernel: Any) -> Any:
        def total(*inputs: jax.Array) -> jax.Array:
            out = kernel(*inputs, jnp.asarray(segment_ids), HEADS.scale) * kept
            return jnp.square(out).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

    found = jax.tree.leaves(results(attention.pallas))
    expected = jax.tree.leaves(results(attention.reference))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_kernel_is_refused_that_lets_segments_see_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaky(q: Any, k: Any, v: Any, segment_ids: Any, scale: float) -> jax.Array:
        return attention.reference(q, k, v, jnp.ones_like(segment_ids), scale)

    monkeypatch.setitem(attention.KERNELS, "pallas", leaky)
    with pytest.raises(ConfigError, match="pallas on .*: packed rollouts see each other"):
        attention.check("pallas", HEADS)


def test_a_kernel_is_refused_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharper(q: Any, k: Any, v: Any, segment_ids: Any, scale: float) -> jax.Array:
        return attention.reference(q, k, v, segment_ids, 1.1 * scale)

    monkeypatch.setitem(attention.KERNELS, "pallas", sharper)
    with pytest.raises(ConfigError, match="is off by .* from the reference in float32"):
        attention.check("pallas", HEADS)


def test_a_kernel_is_refused_where_it_cannot_be_computed() -> None:
    with pytest.raises(ConfigError, match="cudnn on cpu cannot be computed .*reference, which is"):
        attention.check("cudnn", HEADS)


def by_blocks(q: Any, k: Any, v: Any, segment_ids: Any, scale: float) -> jax.Array:
    """A kernel that takes rows of whole blocks alone."""
    if q.shape[1] % 128:
        raise ValueError(f"q_seq_len={q.shape[1]} must be a multiple of block_q=128")
    return attention.reference(q, k, v, segment_ids, scale)


def test_a_kernel_is_refused_that_does_not_take_the_rows_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(attention.KERNELS, "pallas", by_blocks)
    attention.check("pallas", HEADS, (256, 384))
    with pytest.raises(ConfigError, match="cannot be computed .*q_seq_len=200 must be a multiple"):
        attention.check("pallas", HEADS, (256, 200))


def test_auto_takes_the_first_kernel_that_computes_the_rows_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN cannot be computed here."""
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(attention.jax, "devices", lambda: [gpu])
    monkeypatch.setitem(attention.KERNELS, "pallas", by_blocks)

    def chosen(*row_lengths: int) -> str:
        return attention._choose("auto", HEADS, False, False, row_lengths)

    assert (chosen(128, 512), chosen(128, 200)) == ("pallas", "reference")


GPU_RUNS = ("gsm8k-1gpu", "qwen3-8b-8xh100", "qwen3-8b-2x8xh100", "qwen3-30b-a3b")
CUDA_CALLS = {"cudnn": "cudnn$fmha", "pallas": "xla.gpu.triton"}
HEADS_OF = {"qwen3-30b-a3b": (4, 8), "gsm8k-1gpu": (8, 2)}


@pytest.mark.parametrize("name", GPU_RUNS)
@pytest.mark.parametrize("kernel", CUDA_CALLS)
def test_the_kernels_lower_for_cuda_at_the_rows_of_the_run_files(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, as for a Hopper with cuDNN 9.10, whose own checks need the device."""
    monkeypatch.setattr(attention.jax_cudnn, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(attention.jax_cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(attention.jax, "default_backend", lambda: "gpu")
    heads = Heads(*HEADS_OF.get(name, (8, 4)), 128, "bfloat16", 128**-0.5)
    for tokens in run_file.load(ROOT / f"deploy/runs/{name}.yaml").batcher.all_row_lengths:
        traced = attention.traced(attention.KERNELS[kernel], heads, tokens)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert CUDA_CALLS[kernel] in lowered


def test_segments_are_told_to_cudnn_by_offset_and_length() -> None:
    rows = jnp.array([[1, 1, 1, 2, 0, 0], [1, 2, 2, 2, 2, 2]])
    offsets, lengths, fits = attention.segment_table(rows, 3)
    assert offsets.tolist() == [[0, 3, 4, -1], [0, 1, -1, -1]]
    assert lengths.tolist() == [[3, 1, 2], [1, 5, -1]]
    assert bool(fits)
    assert not bool(attention.segment_table(rows, 2)[2])  # The padding is the third.


def test_rows_with_more_segments_than_cudnn_takes_are_counted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CUDNN_SEGMENTS", 3)
    rows = np.array([[1, 2, 3, 3], [1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 3, 4]], np.int32)
    with use_mesh():
        plain = model.load(tiny, CONTEXT)
    assert attention.slow_rows(attention.with_kernel(plain, "cudnn"), rows) == 2
    for row in rows:
        fits = attention.segment_table(jnp.asarray(row[None]), 3)[2]
        counted = attention.slow_rows(attention.with_kernel(plain, "cudnn"), row[None])
        assert counted == (not bool(fits))
    assert attention.slow_rows(attention.with_kernel(plain, "pallas"), rows) == 0
    assert attention.slow_rows(plain, rows) == 0


@dataclass
class FakeCudnn:
    """What JAX's cuDNN attention computes by its documentation, in numpy, one segment at a time."""

    calls: int = 0

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        q_seqlen: jax.Array,
        kv_seqlen: jax.Array,
        q_offsets: jax.Array,
        kv_offsets: jax.Array,
        scale: float,
        mask_type: Any,
    ) -> jax.Array:
        assert mask_type.name == "PADDING_CAUSAL"
        assert kv_seqlen is q_seqlen and kv_offsets is q_offsets
        shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
        return jax.pure_callback(self._compute, shape, q, k, v, q_offsets, q_seqlen, scale)

    def _compute(
        self, q: Any, k: Any, v: Any, offsets: Any, lengths: Any, scale: Any
    ) -> np.ndarray:
        self.calls += 1
        q, k, v, offsets, lengths = map(np.asarray, (q, k, v, offsets, lengths))
        out = np.full(q.shape, np.nan, np.float32)
        for row, head in np.ndindex(q.shape[0], q.shape[2]):
            of = head * k.shape[2] // q.shape[2]
            for begin, length in zip(offsets[row], lengths[row], strict=False):
                part = (row, slice(begin, begin + length))
                if length < 0:
                    continue
                logits = float(scale) * q[part][:, head] @ k[part][:, of].T
                logits[np.triu_indices(length, 1)] = -np.inf
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[(*part, head)] = weights @ v[part][:, of]
        return out


def test_cudnn_is_given_every_segment_and_a_row_with_too_many_goes_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCudnn()
    monkeypatch.setattr(attention.jax_cudnn, "dot_product_attention", fake)
    monkeypatch.setattr(attention, "CUDNN_SEGMENTS", 4)
    few = jnp.array([[1] * 3 + [2] * 5 + [0] * 2, [1] * 4 + [2] * 2 + [3] * 3 + [4]])
    many = jnp.array([[1] * 3 + [2] * 5 + [0] * 2, [1, 1, 1, 2, 2, 3, 3, 4, 5, 5]])
    keys = jax.random.split(jax.random.PRNGKey(1), 3)
    q = jax.random.normal(keys[0], (2, 10, 2, 3, 8))
    k = jax.random.normal(keys[1], (2, 10, 2, 8))
    v = jax.random.normal(keys[2], (2, 10, 2, 8))
    for segments, calls in ((few, 1), (many, 1)):
        found = jax.jit(attention.cudnn, static_argnums=4)(q, k, v, segments, 0.3)
        expected = attention.reference(q, k, v, segments, 0.3)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert fake.calls == calls


def test_where_there_is_no_gpu_auto_is_the_reference() -> None:
    assert attention._choose("auto", HEADS, bounded=False, divided=False) == "reference"


def test_the_kernels_are_refused_for_a_model_with_a_soft_cap() -> None:
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        attention._choose("pallas", HEADS, bounded=True, divided=False)


@pytest.fixture(autouse=True)
def _not_chosen_yet() -> Iterator[None]:
    attention._choose.cache_clear()
    yield
    attention._choose.cache_clear()


@pytest.fixture
def _mesh() -> Iterator[None]:
    with use_mesh():
        yield


@pytest.mark.usefixtures("_mesh")
def test_a_model_computes_the_same_through_a_kernel(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[tuple[str, Heads]]()
    monkeypatch.setattr(
        attention, "check", lambda name, heads, lengths: checked.append((name, heads))
    )
    packed = example([[ONE, TWO], [TWO, ONE, ONE]], 128)
    real = packed.segment_ids > 0
    plain = model.load(tiny, CONTEXT)
    through = model.load(tiny, CONTEXT, Learner(attention="pallas"))
    assert checked == [("reference", mock.ANY), ("pallas", Heads(2, 1, 16, "float32", 0.25))]

    @eqx.filter_jit
    def computed(policy: Any) -> tuple[jax.Array, Any]:
        def loss(policy: Any) -> tuple[jax.Array, jax.Array]:
            logprobs = model.predict(policy, packed).logprobs
            return (logprobs * real).sum(), logprobs

        (_, logprobs), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(policy)
        return logprobs, gradient

    expected, wanted = computed(plain)
    found, gradient = computed(through)
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert export.state_dict(through).keys() == export.state_dict(plain).keys()
    assert "pallas_call" in str(jax.make_jaxpr(lambda: model.predict(through, packed))())
