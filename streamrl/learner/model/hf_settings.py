"""The contents of a config.json as published: checked, and in the form of transformers 4.

transformers 4 and 5 name some settings differently, converters mix the two, and Levanter reads what
it finds without a check. So a setting of an unexpected kind is refused here, by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(gt=0, le=10_000)]  # transformers makes a list of them.
Positive = Annotated[float, Field(gt=0)]

# What the supported families compute only with this value, or where the setting is missing or null.
NEUTRAL: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
}
# How older tools than transformers' own name a quantization in config.json.
QUANTIZATIONS = ("quantization_config", "compression_config")
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The types of rotary embeddings that Levanter computes, and what each needs."""


class UnsupportedSetting(ValueError):
    """A setting that Levanter would compute wrongly, or that is not what it should be. The message
    names it, and what to do if something can be done.
    """


class HfSettings(BaseModel):
    """The settings that the learner reads, with their types. A missing one has the default of its
    family.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    model_type: str
    architectures: list[str] | None = None
    vocab_size: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_local_base_freq: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    sliding_window: Count | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None


def check_settings(settings: Mapping[str, Any], architecture: str) -> None:
    """Check what is the same in every family. `architecture`: the family's class with a head.
    Raises UnsupportedSetting.
    """
    _check_types(settings)
    _check_architecture(settings, architecture)
    for name in QUANTIZATIONS:
        if settings.get(name):
            method = settings[name].get("quant_method", "unknown")
            raise UnsupportedSetting(
                f"{name} names the method {method!r}: quantized weights cannot be trained or"
                " scored; give the model in bfloat16, or take the setting out if the weights are"
                " not quantized"
            )
    for name, value in NEUTRAL.items():
        if settings.get(name) is not None and settings[name] != value:
            raise UnsupportedSetting(
                f"{name} is {json.dumps(settings[name])} and is not supported; it must be"
                f" {json.dumps(value)}"
            )
    for kind in settings.get("layer_types") or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedSetting(
                f"layer_types has {kind!r}, which is not supported; {' and '.join(LAYER_TYPES)} are"
            )
    _check_heads(settings)


def with_plain_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with `rope_theta`, `rope_local_base_freq` and `rope_scaling` where transformers
    4 reads them. As in transformers 5, what `rope_parameters` has, also for a layer type, comes
    before what is at the top. Raises UnsupportedSetting.
    """
    given = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    used = settings.get("layer_types") or LAYER_TYPES
    by_layer = {kind: given[kind] for kind in used if isinstance(given.get(kind), Mapping)}
    # Gemma's configs of transformers 4 have no default for rope_scaling.
    plain = {name: value for name, value in settings.items() if name != "rope_parameters"}
    base = settings.get("rope_theta")
    if not by_layer:
        theta, scaling = _rope_of(given, base)
        return {**_with_known(plain, rope_theta=theta), "rope_scaling": scaling}
    is_gemma3 = settings.get("model_type") == "gemma3_text"
    local_base = settings.get("rope_local_base_freq") if is_gemma3 else base
    ropes = {
        kind: _rope_of(rope, local_base if kind == "sliding_attention" else base)
        for kind, rope in by_layer.items()
    }
    # A layer type without parameters has those of the other.
    full = ropes.get("full_attention") or ropes["sliding_attention"]
    local = ropes.get("sliding_attention") or full
    if full[1] != local[1] or (not is_gemma3 and full[0] != local[0]):
        raise UnsupportedSetting(
            "rope_parameters of full_attention and sliding_attention differ: Levanter has one"
            " rotary embedding for all layers"
        )
    known = _with_known(plain, rope_theta=full[0], rope_local_base_freq=local[0])
    return {**known, "rope_scaling": full[1]}


def _rope_of(given: Mapping[str, Any], base: Any) -> tuple[Any, dict[str, Any] | None]:
    """The base and the scaling of one rotary embedding. `base`: where it has none in it. None: the
    family's default.
    """
    rope = dict(given)
    theta = rope.pop("rope_theta", base)
    factor = rope.pop("partial_rotary_factor", None)
    kind = rope.get("rope_type") or rope.get("type")
    if kind and rope.get("type", kind) != kind:
        raise UnsupportedSetting(
            f"rotary embeddings have rope_type {kind!r} and type {rope['type']!r}; take the wrong"
            " one out"
        )
    if rope and not kind:
        raise UnsupportedSetting(f"rotary embeddings have {', '.join(rope)} and no rope_type")
    kind = kind or "default"
    if kind not in ROPES:
        raise UnsupportedSetting(f"rope type {kind!r} is not supported; {', '.join(ROPES)} are")
    if factor not in (None, 1.0):
        raise UnsupportedSetting(
            f"partial_rotary_factor is {factor!r} and is not supported; it must be 1.0"
        )
    needed = {name: rope.get(name) for name in ROPES[kind]}
    if theta is not None:
        needed["rope_theta"] = theta
    for name, value in needed.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise UnsupportedSetting(
                f"rotary embeddings of type {kind} need a number above 0 as {name}, not"
                f" {json.dumps(value)}"
            )
    return theta, None if kind == "default" else rope


def _with_known(settings: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The settings with these values. One that is None is left out, so that it has the default of
    its family.
    """
    others = {name: value for name, value in settings.items() if name not in values}
    return {**others, **{name: value for name, value in values.items() if value is not None}}


def _check_types(settings: Mapping[str, Any]) -> None:
    try:
        HfSettings.model_validate(dict(settings))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        value = json.dumps(problem["input"])[:100]
        message = problem["msg"][0].lower() + problem["msg"][1:]
        raise UnsupportedSetting(f"{name} is {value}; {message}") from None


def _check_architecture(settings: Mapping[str, Any], architecture: str) -> None:
    """Refuse classifiers, reward models, bare encoders and classes of other code."""
    named = settings.get("architectures")
    if named and architecture not in named:
        raise UnsupportedSetting(
            f"architectures names {', '.join(named)}; a {settings['model_type']} that can be"
            f" trained is a {architecture}"
        )


def _check_heads(settings: Mapping[str, Any]) -> None:
    hidden = settings.get("hidden_size")
    heads = settings.get("num_attention_heads")
    shared = settings.get("num_key_value_heads")
    if heads and shared and heads % shared:
        raise UnsupportedSetting(
            f"num_attention_heads is {heads} and num_key_value_heads is {shared}: the first must be"
            " a multiple of the second"
        )
    if hidden and heads and not settings.get("head_dim") and hidden % heads:
        raise UnsupportedSetting(
            f"hidden_size is {hidden} and num_attention_heads is {heads}: without head_dim, the"
            " first must be a multiple of the second"
        )
