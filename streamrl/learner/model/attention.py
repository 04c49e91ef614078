"""Attention: the kernel that computes it is chosen by the device, and checked at the start of a
learner: through it, packed sequences must not see each other. The kernels are JAX's and Levanter's.

Each kernel maps `q`: (rows, tokens, kv_heads, queries a key-value head, head_size), `k` and `v`:
(rows, tokens, kv_heads, head_size), `segment_ids`: (rows, tokens) int32 and a scale to (the shape
of q). Segments have the ids 1, 2, ... from left to right, and 0 after them. Each token
attends to those of its segment up to itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.partitioning import pspec_for_axis, shard_map
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.experimental.pallas.ops.gpu.attention import mha
from levanter.layers import attention as levanter
from levanter.layers.attention import Attention, AttentionBackend, AttentionMask

from streamrl.config.sections.learner import Learner
from streamrl.system.errors import ConfigError, describe_error

logger = logging.getLogger(__name__)

Kernel = Callable[..., jax.Array]  # (q, k, v, segment_ids, scale)

# Segments of a row that cuDNN is given memory for. A row with more is computed by the reference.
CUDNN_SEGMENTS = 64
PALLAS_BLOCK = 128  # Tokens that the kernel in Pallas computes at a time. Rows are padded to it.
# Largest difference from the reference, as a share of its largest value. GPUs multiply float32
# with the mantissa of TF32.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.03}


class Heads(NamedTuple):
    """What a kernel has to compute."""

    kv_heads: int
    queries: int  # query heads of each key-value head
    head_size: int
    dtype: str
    scale: float


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
    """Levanter's attention in plain JAX, by blocks of 1,024 tokens in longer rows."""
    rows = ("rows", "position")
    named_q = hax.named(q, (*rows, "kv_head", "queries", "head_size"))
    named_k = hax.named(k, ("rows", "keys", "kv_head", "head_size"))
    named_v = hax.named(v, ("rows", "keys", "kv_head", "head_size"))
    mask = AttentionMask.causal().with_segment_ids(hax.named(segment_ids, rows))
    attended = levanter.dot_product_attention(
        "position",
        "keys",
        "head_size",
        named_q,
        named_k,
        named_v,
        mask,
        attn_backend=AttentionBackend.JAX_FLASH,
        scaling_factor=scale,
    )
    return attended.rearrange(named_q.axes).array.astype(q.dtype)


def pallas(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
    """JAX's flash attention in Pallas, compiled by Triton. Where there is no GPU it is interpreted,
    which takes long. Rows may have any length: they are padded to whole blocks here.
    """
    rows, tokens, kv_heads, queries, size = q.shape
    padding = -tokens % PALLAS_BLOCK

    def padded(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, padding), *((0, 0),) * (array.ndim - 2)))

    attended: Any = mha(
        padded(q.reshape(rows, tokens, kv_heads * queries, size)),
        padded(jnp.repeat(k, queries, axis=2)),
        padded(jnp.repeat(v, queries, axis=2)),
        padded(segment_ids),
        sm_scale=scale,
        causal=True,
        interpret=jax.default_backend() != "gpu",
    )
    return attended[:, :tokens].reshape(q.shape)


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
    """cuDNN's attention over packed sequences, for bfloat16 on GPUs from Hopper on."""
    rows, tokens, kv_heads, queries, size = q.shape
    wide = (rows, tokens, kv_heads * queries, size)
    offsets, lengths, fits = segment_table(segment_ids, CUDNN_SEGMENTS)

    def fused() -> jax.Array:
        attended: Any = jax_cudnn.dot_product_attention(
            q.reshape(wide),
            k,
            v,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=scale,
            mask_type=jax_cudnn.MaskType.PADDING_CAUSAL,
        )
        return attended.reshape(q.shape)

    return jax.lax.cond(fits, fused, lambda: reference(q, k, v, segment_ids, scale))


def segment_table(segment_ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the segments of each row begin: (rows, count + 1) int32; their lengths: (rows, count)
    int32; and whether no row has more than `count`. -1 is after the last one. The padding of a
    row is a segment, too.
    """
    rows = len(segment_ids)
    begins = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    number = jnp.cumsum(begins, axis=1) - 1
    row = jnp.arange(rows)[:, None]
    lengths = jnp.zeros((rows, count), jnp.int32).at[row, number].add(1, mode="drop")
    ends = jnp.cumsum(lengths, axis=1)
    exists = lengths > 0
    offsets = jnp.where(exists, ends - lengths, -1)
    padding = jnp.full((rows, 1), -1, jnp.int32)
    fits = number[:, -1].max() < count
    return jnp.concatenate((offsets, padding), axis=1), jnp.where(exists, lengths, -1), fits


KERNELS: dict[str, Kernel] = {"cudnn": cudnn, "pallas": pallas, "reference": reference}


class KernelAttention(Attention):
    """Levanter's layer of attention, computed by a kernel that Levanter does not know."""

    kernel: str = eqx.field(static=True, default="pallas")

    def __call__(
        self,
        x: NamedArray,
        mask: NamedArray | AttentionMask | None,
        *,
        key: Any = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        assert isinstance(mask, AttentionMask) and mask.segment_ids is not None, "rows are packed"
        q, k, v = self._compute_qkv(x, key=None, pos_ids=pos_ids)
        rows = ("batch", "position")
        q = q.rearrange((*rows, "kv_head", "q_heads_per_group", "head_size"))
        k = k.rearrange((*rows, "kv_head", "head_size"))
        v = v.rearrange((*rows, "kv_head", "head_size"))
        segment_ids = mask.segment_ids[0].rearrange(rows)
        # The compiler cannot divide a kernel, so each device calls it for its rows and heads.
        inputs = (q, k, v, segment_ids)
        call: Any = shard_map(
            partial(KERNELS[self.kernel], scale=heads_of(self.config, str(x.dtype)).scale),
            in_specs=tuple(pspec_for_axis(array.axes) for array in inputs),
            out_specs=pspec_for_axis(q.axes),
        )
        attended = hax.named(call(*(array.array for array in inputs)), q.axes)
        flat = attended.flatten_axes(("kv_head", "q_heads_per_group"), "heads")
        return self.o_proj(flat.astype(x.dtype), key=None)


def with_kernel(model: Any, kernel: str) -> Any:
    """The model with its attention computed by this kernel. Its parameters, and their names, are
    the same.
    """

    def replaced(node: Any) -> Any:
        if not isinstance(node, Attention):
            return node
        return KernelAttention(**vars(node), kernel=kernel)

    if kernel == "reference":
        return model
    return jax.tree.map(replaced, model, is_leaf=lambda node: isinstance(node, Attention))


def slow_rows(model: Any, segment_ids: np.ndarray) -> int:
    """How many rows of a batch have more segments than the model's kernel takes. The micro-batches
    with them are computed by the reference. `segment_ids`: (rows, tokens) int32.
    """
    layers = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, KernelAttention))
    fused = any(isinstance(layer, KernelAttention) and layer.kernel == "cudnn" for layer in layers)
    if not fused:
        return 0
    has_padding = segment_ids.min(axis=1) == 0
    return int((segment_ids.max(axis=1) + has_padding > CUDNN_SEGMENTS).sum())


def heads_of(config: Any, dtype: str) -> Heads:
    """What a kernel has to compute for Levanter's config of a layer of attention."""
    scale = config.scaling_factor or config.head_size**-0.5
    return Heads(config.num_kv_heads, config.q_heads_per_group, config.head_size, dtype, scale)


def choose(compute: Learner, config: Any, row_lengths: Sequence[int] = ()) -> str:
    """The kernel for `learner.attention`, checked for rows of these lengths. `config`: Levanter's
    config of the model. Raises ConfigError.
    """
    layer = config.attention_config()
    dtype = {"float32": "float32", "bf16": "bfloat16"}[compute.precision]
    bounded = layer.logits_soft_cap is not None
    divided = compute.mesh.context > 1
    heads = heads_of(layer, dtype)
    return _choose(compute.attention, heads, bounded, divided, tuple(row_lengths))


@cache
def _choose(
    wanted: str, heads: Heads, bounded: bool, divided: bool, row_lengths: tuple[int, ...] = ()
) -> str:
    """`bounded`: the model has a soft cap on the logits of attention. `divided`: several devices
    divide the tokens of a row.
    """
    device = jax.devices()[0]
    candidates = [wanted]
    if wanted == "auto":
        plain = device.platform != "gpu" or bounded or divided
        candidates = ["reference"] if plain else ["cudnn", "pallas", "reference"]
    elif wanted != "reference" and bounded:
        raise ConfigError(
            f"learner.attention {wanted} cannot compute the attn_logit_softcapping of this model;"
            " set learner.attention: reference"
        )
    for kernel in candidates:
        try:
            check(kernel, heads, row_lengths)
        except ConfigError as error:
            if kernel == candidates[-1]:
                raise
            logger.warning("%s", error)
            continue
        logger.info(
            "attention: %s (learner.attention: %s) for %d heads of %d in %s, on %s",
            kernel,
            wanted,
            heads.kv_heads * heads.queries,
            heads.head_size,
            heads.dtype,
            device.device_kind,
        )
        return kernel
    raise AssertionError("the last candidate is chosen or refused")


def check(name: str, heads: Heads, row_lengths: Sequence[int] = ()) -> None:
    """Check that a kernel keeps the segments of a row apart and computes what the reference does,
    in values and gradients, and that it compiles for rows of these lengths. Raises ConfigError.
    """
    if name == "reference":
        return  # tests/learner/model/test_model.py checks it.
    where = f"learner.attention {name} on {jax.devices()[0].device_kind}"
    instead = "set learner.attention: reference, which is slower"
    try:
        difference, seen = compare(KERNELS[name], heads)
        for tokens in row_lengths:
            traced(KERNELS[name], heads, tokens).lower().compile()
    except Exception as error:
        # whatever JAX, Triton or cuDNN make of a device that they do not support
        raise ConfigError(
            f"{where} cannot be computed ({describe_error(error, 300)}); {instead}"
        ) from None
    if not seen == 0:
        raise ConfigError(
            f"{where}: packed rollouts see each other; the states of one segment change by"
            f" {seen:.3g} with the tokens of another. {instead[0].upper()}{instead[1:]}"
        )
    if not difference <= TOLERANCES[heads.dtype]:
        raise ConfigError(
            f"{where} is off by {difference:.3g} from the reference in {heads.dtype}"
            f" ({TOLERANCES[heads.dtype]:g} is allowed); {instead}"
        )


def traced(kernel: Kernel, heads: Heads, tokens: int) -> Any:
    """A kernel's values and gradients for one row of so many tokens, traced by JAX."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids, heads.scale).astype(jnp.float32).sum()

    narrow = (1, tokens, heads.kv_heads, heads.head_size)
    wide = (*narrow[:3], heads.queries, heads.head_size)
    shapes = [jax.ShapeDtypeStruct(shape, heads.dtype) for shape in (wide, narrow, narrow)]
    segment_ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2))).trace(*shapes, segment_ids)


def compare(kernel: Kernel, heads: Heads) -> tuple[float, float]:
    """How far a kernel is from the reference, in values and gradients, as a share of the largest
    value; and by how much the second of two packed segments depends on the first.
    """
    tokens = 256  # several blocks of every kernel
    segments = np.repeat(np.array([1, 2, 0], np.int32), [90, 140, 26])[None]
    second = jnp.asarray(segments == 2)[..., None, None, None]
    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    wide = (1, tokens, heads.kv_heads, heads.queries, heads.head_size)
    narrow = (1, tokens, heads.kv_heads, heads.head_size)
    q, k, v, other, weights = (
        jax.random.normal(key, shape).astype(heads.dtype)
        for key, shape in zip(keys, (wide, narrow, narrow, narrow, wide), strict=True)
    )
    first = jnp.asarray(segments == 1)[..., None, None]

    def result(computed: Kernel, *inputs: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The outputs of the second segment, and the gradients of their weighted sum."""

        def weighted_sum(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = computed(*inputs, jnp.asarray(segments), heads.scale) * second
            return (out * weights).astype(jnp.float32).sum(), out

        gradients_of = jax.value_and_grad(weighted_sum, argnums=(0, 1, 2), has_aux=True)
        (_, out), gradients = gradients_of(*inputs)
        return out, list(gradients)

    run = jax.jit(result, static_argnums=0)
    out, gradients = run(kernel, q, k, v)
    expected, expected_gradients = run(reference, q, k, v)
    changed, _ = run(kernel, q, jnp.where(first, other, k), jnp.where(first, other, v))
    difference = max(
        _distance(value, wanted) / float(jnp.abs(wanted).max())
        for value, wanted in zip([out, *gradients], [expected, *expected_gradients], strict=True)
    )
    leaked = [float(jnp.abs(array * first).max()) for array in gradients[1:]]
    return difference, max(_distance(out, changed), *leaked)


def _distance(one: jax.Array, other: jax.Array) -> float:
    return float(jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32)).max())
