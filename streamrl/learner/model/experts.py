"""The layers of a mixture of experts, computed where the tokens are, and along the experts that the
server's tokens were sent to.

Levanter's own layers sort the tokens of all devices together, so every device would compute all of
them. Here each device computes its own tokens, with the experts of a layer gathered as those of
other layers are. Where the mesh has an axis `expert`, its devices divide the experts of each layer
instead, and each computes its experts for the tokens of all of them.

Routing replay (R3, arXiv:2510.11370): a server in another precision sends some tokens to other
experts than the learner would, and the logprobs of these differ by much more than by rounding. With
the server's choice the weights of the chosen experts are still the learner's own softmax of the
router's logits, and so is their gradient.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import haliax as hax
import haliax.partitioning
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from haliax import NamedArray
from haliax.nn import ragged_dot
from jax.sharding import PartitionSpec
from levanter.layers.attention import AttentionMask
from levanter.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock

from streamrl.stream.records import Batch

logger = logging.getLogger(__name__)

EXPERT = "expert"  # axis of the mesh
BATCH = "batch"  # axes of the model's arrays
POSITION = "position"


class Routing(NamedTuple):
    """The experts of each token. Both arrays are (tokens, k)."""

    weights: jax.Array  # float32: of the experts' outputs
    experts: jax.Array  # int32, from 0


def has_experts(model: Any) -> bool:
    return isinstance(model.config, Qwen3MoeConfig)


def without_experts(batch: Batch) -> Batch:
    return msgspec.structs.replace(batch, routed_experts=None, prompt_routed_experts=None)


def without_foreign_experts(batch: Batch, model: Any) -> Batch:
    """The batch without routed experts that the model cannot have chosen, which is warned of.

    It comes before the dense arrays, whose size would be what such experts claim.
    """
    chosen = batch.routed_experts
    if chosen is None:
        return batch
    if has_experts(model):
        config: Qwen3MoeConfig = model.config
        wanted = (config.num_layers, config.num_experts_per_tok)
        prompts = batch.prompt_routed_experts
        largest = max(int(array.max(initial=0)) for array in (chosen, prompts) if array is not None)
        if chosen.shape[1:] == wanted and largest <= config.num_experts:
            return batch
    logger.warning(
        "the batch has routed experts of %d layers, %d a token, which are not those of this model:"
        " its own router decides",
        *chosen.shape[1:],
    )
    return without_experts(batch)


def activations(
    model: Any,
    tokens: NamedArray,
    mask: AttentionMask,
    pos_ids: NamedArray,
    chosen: jax.Array | np.ndarray | None = None,
) -> NamedArray:
    """The hidden states after the last layer, (rows, max_seq_len, width).

    `chosen`: (rows, max_seq_len, layers, k) int, the experts of each token, counted from 1; where
    they are 0, and without it, the router decides.
    """
    layers = model.transformer.layers
    named: NamedArray | None = None
    if chosen is not None:
        axes = (*tokens.axes, layers.Block, model.config.TopExperts)
        named = hax.named(jnp.asarray(chosen), axes)
    hidden = layers.fold_via(_through_layer)(
        model.embeddings.embed(tokens), named, mask=mask, pos_ids=pos_ids
    )
    return model.transformer.norm(hidden)


def _through_layer(
    layer: Qwen3MoeDecoderLayer,
    hidden: NamedArray,
    chosen: NamedArray | None,
    mask: AttentionMask,
    pos_ids: NamedArray,
) -> NamedArray:
    """Computes what `Qwen3MoeDecoderLayer.__call__` does, with these experts."""
    normal = layer.input_layernorm(hidden)
    hidden = hidden + layer.self_attn(x=normal, mask=mask, key=None, pos_ids=pos_ids)
    return hidden + mix(layer.mlp, layer.post_attention_layernorm(hidden), chosen)


def mix(block: Qwen3MoeSparseMoeBlock, x: NamedArray, chosen: NamedArray | None) -> NamedArray:
    """The weighted sum of what each token's experts make of it. The names of axes are those of
    Levanter's mesh.
    """
    config = block.config
    x = x.rearrange((BATCH, POSITION, config.Embed))
    logits = block.gate(x).rearrange((BATCH, POSITION, config.Experts))
    experts = block.experts
    inner = (config.Experts, config.Embed, config.MoeMlp)
    outer = (config.Experts, config.MoeMlp, config.Embed)
    tokens_spec = haliax.partitioning.pspec_for_axis(x.axes)
    rows, positions = tokens_spec[0], tokens_spec[1]
    width = haliax.partitioning.physical_axis_name(config.MoeMlp)
    divided = EXPERT if jax.sharding.get_abstract_mesh().shape.get(EXPERT, 1) > 1 else None
    gathers = divided is not None and divided in _names(rows)
    by_token = PartitionSpec(rows, positions, None)

    def on_device(
        x: jax.Array,
        logits: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        given: jax.Array | None,
    ) -> jax.Array:
        shape = x.shape
        tokens = x.reshape(-1, shape[-1])
        if given is not None:
            given = given.reshape(-1, given.shape[-1])
        routing = route(logits.reshape(-1, logits.shape[-1]), given, config)
        first: Any = 0
        if divided is not None:
            first = jax.lax.axis_index(divided) * gate.shape[0]
        if gathers:
            tokens = jax.lax.all_gather(tokens, EXPERT, tiled=True)
            routing = Routing(*(jax.lax.all_gather(a, EXPERT, tiled=True) for a in routing))
        routing = routing._replace(experts=routing.experts - first)
        mixed = compute(tokens, routing, gate, up, down, experts.act)
        if gathers:
            mixed = jax.lax.psum_scatter(mixed, EXPERT, tiled=True)
        elif divided is not None:
            mixed = jax.lax.psum(mixed, divided)
        if width is not None:
            mixed = jax.lax.psum(mixed, width)
        return mixed.reshape(shape)

    mixed = jax.shard_map(
        on_device,
        in_specs=(
            by_token,
            by_token,
            PartitionSpec(divided, None, width),
            PartitionSpec(divided, None, width),
            PartitionSpec(divided, width, None),
            by_token,
        ),
        out_specs=by_token,
        check_vma=False,
    )(
        x.array,
        logits.array,
        experts.gate_proj.weight.rearrange(inner).array,
        experts.up_proj.weight.rearrange(inner).array,
        experts.down_proj.weight.rearrange(outer).array,
        None if chosen is None else chosen.rearrange((BATCH, POSITION, config.TopExperts)).array,
    )
    return hax.named(mixed, x.axes)


def route(logits: jax.Array, given: jax.Array | None, config: Qwen3MoeConfig) -> Routing:
    """Choose the k experts of each token, weighted by the softmax of the router's logits at them.

    `logits`: (tokens, experts). `given`: (tokens, k) int, experts counted from 1 that are taken
    instead of the likeliest ones; 0: not known.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, config.num_experts_per_tok)
    if given is not None:
        known = jnp.all(given > 0, axis=-1, keepdims=True)
        experts = jnp.where(known, given.astype(experts.dtype) - 1, experts)
        weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights, experts)


def compute(
    tokens: jax.Array,
    routing: Routing,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    activation: Any,
) -> jax.Array:
    """The sum over each token's experts of weight * down(activation(gate(x)) * up(x)), (tokens,
    width). An expert that is not one of these weights' adds nothing.

    `tokens`: (tokens, width). `gate`, `up`: (experts, width, inner); `down`: (experts, inner,
    width). The tokens are sorted by their experts, and each expert computes a stretch of them. On a
    GPU, the rows after the last stretch are not written: neither they nor their gradients are read.
    """
    here = gate.shape[0]
    k = routing.experts.shape[1]
    is_here = (routing.experts >= 0) & (routing.experts < here)
    expert = jnp.where(is_here, routing.experts, here).reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=here + 1)[:here]
    is_sent = jnp.arange(len(order)) < jnp.sum(sizes)
    sent = jnp.where(is_sent[:, None], tokens[order // k], 0)
    hidden = activation(ragged_dot(sent, gate, sizes)) * ragged_dot(sent, up, sizes)
    outputs = ragged_dot(hidden, down, sizes)
    by_token = outputs[jnp.argsort(order)].reshape(-1, k, outputs.shape[-1])
    weighted = jnp.where(is_here[..., None], by_token, 0)
    return jnp.einsum("tk,tkw->tw", routing.weights.astype(tokens.dtype), weighted)


def _names(spec: Any) -> tuple[str, ...]:
    """The axes of the mesh that one dimension is divided among."""
    if spec is None:
        return ()
    return (spec,) if isinstance(spec, str) else tuple(spec)
