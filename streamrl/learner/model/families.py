"""The Hugging Face models that the learner can train: Llama, Qwen, Qwen's mixture of experts and
Gemma, with their settings translated to Levanter's.

Levanter silently drops some settings, such as the width of heads and the scale and soft cap of
Gemma's attention. This module passes on what Levanter can compute and refuses the rest with a
one-line error. tests/learner/model/test_families.py compares each family with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from levanter.layers.attention import AttentionBackend, AttentionConfig
from levanter.layers.rotary import RotaryEmbeddingsConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.qwen import Qwen3Config, QwenConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from transformers import Gemma2Config as HfGemma2Config
from transformers import Gemma3TextConfig as HfGemma3Config
from transformers import GemmaConfig as HfGemmaConfig
from transformers import LlamaConfig as HfLlamaConfig
from transformers import PretrainedConfig
from transformers import Qwen2Config as HfQwen2Config
from transformers import Qwen3Config as HfQwen3Config
from transformers import Qwen3MoeConfig as HfQwen3MoeConfig

from streamrl.learner.model.hf_settings import (
    QUANTIZATIONS,
    UnsupportedSetting,
    check_settings,
    with_plain_rope,
)

PLAIN_YARN = {
    "rope_type",
    "type",
    "factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
}
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")


class ModelFamily(NamedTuple):
    """The models of one `model_type`."""

    levanter: type[Any]
    hf: type[PretrainedConfig]
    # what `from_hf_config` leaves out or gets wrong
    settings: Callable[[Any], dict[str, Any]] = lambda hf: {}

    @property
    def architecture(self) -> str:
        """transformers' class of the models that have a language-model head."""
        name = self.hf.__name__.removesuffix("Config").removesuffix("Text")
        return f"{name}ForCausalLM"


@dataclass(frozen=True)
class Gemma(GemmaConfig):
    """Gemma with the head width that its config.json gives."""

    def attention_config(self) -> AttentionConfig:
        return replace(super().attention_config(), head_dim=self.head_dim)


@dataclass(frozen=True)
class Gemma2(Gemma2Config):
    """Gemma 2 with the head width and the attention scale that its config.json gives."""

    def attention_config(self) -> AttentionConfig:
        return replace(
            super().attention_config(), head_dim=self.head_dim, scaling_factor=_scale(self)
        )


@dataclass(frozen=True)
class Gemma3(Gemma3Config):
    """Text-only Gemma 3 with the head width and the attention scale that its config.json gives."""

    def attention_config(self) -> AttentionConfig:
        return replace(
            super().attention_config(), head_dim=self.head_dim, scaling_factor=_scale(self)
        )


def _scale(config: Gemma2Config) -> float:
    return float(config.query_pre_attn_scalar or config.head_dim) ** -0.5


def _llama(hf: Any) -> dict[str, Any]:
    return {"head_dim": hf.head_dim}


def _qwen2(hf: Any) -> dict[str, Any]:
    wide = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if wide * hf.num_attention_heads != hf.hidden_size:
        raise UnsupportedSetting(
            f"head_dim {wide} of a qwen2 is not hidden_size / num_attention_heads"
        )
    return {"use_sliding_window": False}  # no longer than the window: checked


def _qwen3(hf: Any) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _gemma2(hf: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": hf.attn_logit_softcapping,
        "final_logit_softcapping": hf.final_logit_softcapping,
    }


def _gemma3(hf: Any) -> dict[str, Any]:
    types = getattr(hf, "layer_types", None) or ["sliding_attention"]
    one = all(kind == "full_attention" for kind in types) or (
        hf.rope_local_base_freq == hf.rope_theta and not hf.rope_scaling
    )
    if not one:
        raise UnsupportedSetting(
            "local and global layers have different rotary bases (rope_local_base_freq,"
            " rope_theta): Levanter has one for all layers"
        )
    if hf.attn_logit_softcapping:
        raise UnsupportedSetting(
            "attn_logit_softcapping of a gemma3 is not supported; it must be null"
        )
    return {"final_logit_softcapping": hf.final_logit_softcapping}


FAMILIES = {
    "llama": ModelFamily(LlamaConfig, HfLlamaConfig, _llama),
    "qwen2": ModelFamily(QwenConfig, HfQwen2Config, _qwen2),
    "qwen3": ModelFamily(Qwen3Config, HfQwen3Config, _qwen3),
    "qwen3_moe": ModelFamily(Qwen3MoeConfig, HfQwen3MoeConfig, _qwen3),
    "gemma": ModelFamily(Gemma, HfGemmaConfig),
    "gemma2": ModelFamily(Gemma2, HfGemma2Config, _gemma2),
    "gemma3_text": ModelFamily(Gemma3, HfGemma3Config, _gemma3),
}


def to_transformers_v4(settings: Mapping[str, Any]) -> PretrainedConfig:
    """The contents of a config.json, written by transformers 4 or 5, as a config of transformers 4.
    Raises UnsupportedSetting.
    """
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedSetting(
            f"model type {kind!r} is not supported; give model.path one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    check_settings(settings, family.architecture)
    plain = with_plain_rope(settings)
    for name in QUANTIZATIONS:
        plain.pop(name, None)  # transformers 4 does not read one that is null
    if kind == "qwen3_moe":
        _check_experts(settings)
        # transformers 5 writes num_local_experts, which transformers 4 does not read
        plain["num_experts"] = settings.get("num_experts", settings.get("num_local_experts"))
    return family.hf.from_dict(plain)


def _check_experts(settings: Mapping[str, Any]) -> None:
    """Refuse a mixture of experts that Levanter has no layers for."""
    if settings.get("mlp_only_layers") or settings.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedSetting(
            "mlp_only_layers and decoder_sparse_step of a qwen3_moe are not supported; every layer"
            " must have experts"
        )
    count = settings.get("num_experts", settings.get("num_local_experts"))
    chosen = settings.get("num_experts_per_tok", 0)
    if not count or not 0 < chosen <= count:
        raise UnsupportedSetting(
            f"num_experts is {count} and num_experts_per_tok is {chosen}: a qwen3_moe needs both,"
            " and at least as many experts as a token is sent to"
        )


def levanter_config(
    hf: Any, max_seq_len: int, gradient_checkpointing: bool = False, upcast_attn: bool = False
) -> Any:
    """Levanter's config of the model, for sequences of `max_seq_len` tokens. Raises
    UnsupportedSetting.

    `gradient_checkpointing`: of each layer only its input is kept for the backward pass.
    `upcast_attn`: attention is computed in float32, whatever the format of the rest.
    """
    family = FAMILIES[hf.model_type]
    _check_window(hf, max_seq_len)
    if hf.model_type.startswith("gemma") and _activation(hf) not in TANH_GELU:
        raise UnsupportedSetting(
            f"activation {_activation(hf)!r} of a {hf.model_type} is not supported; it must be"
            " gelu_pytorch_tanh"
        )
    own = {
        "max_seq_len": max_seq_len,
        "gradient_checkpointing": gradient_checkpointing,
        "upcast_attn": upcast_attn,
        # Transformer Engine, Levanter's own choice on a GPU, lets packed sequences see each other.
        "attn_backend": AttentionBackend.JAX_FLASH,
        "rope": _rope(hf),
        **family.settings(hf),
    }
    config = family.levanter.from_hf_config(hf)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return family.levanter(**{**fields, **own})


def check_heads(hf: Any, devices: int) -> None:
    """Refuse to divide the heads among devices that they cannot be divided among."""
    if hf.num_key_value_heads % devices:
        raise UnsupportedSetting(
            f"its {hf.num_key_value_heads} key-value heads cannot be divided among"
            f" {devices} devices; lower learner.mesh.model"
        )


def _activation(hf: Any) -> str:
    """The name of the activation. Where an old Gemma has gelu, transformers computes its tanh
    approximation.
    """
    name = getattr(hf, "hidden_activation", None) or getattr(hf, "hidden_act", None) or TANH_GELU[0]
    return TANH_GELU[0] if hf.model_type == "gemma" and name == "gelu" else name


def _check_window(hf: Any, max_seq_len: int) -> None:
    """Refuse a sliding window that is shorter than the sequences. Levanter has none, and within its
    window a sliding layer sees everything, so longer windows are computed correctly.
    """
    slides = getattr(hf, "use_sliding_window", None)
    if slides is None:
        slides = "sliding_attention" in (getattr(hf, "layer_types", None) or ())
    window = getattr(hf, "sliding_window", None)
    if slides and window and window < max_seq_len:
        raise UnsupportedSetting(
            f"sliding_window is {window} tokens, and Levanter has none: lower model.max_seq_len,"
            f" {max_seq_len}, to it"
        )


def _rope(hf: Any) -> RotaryEmbeddingsConfig:
    scaling: dict[str, Any] = dict(hf.rope_scaling or {})
    kind = scaling.get("rope_type") or scaling.get("type")
    more = sorted(name for name in scaling.keys() - PLAIN_YARN if scaling[name] is not None)
    if kind == "yarn" and more:
        raise UnsupportedSetting(
            f"rope setting {more[0]!r} of yarn is not supported; take it out where it has its"
            " default"
        )
    if scaling:
        scaling.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    return RotaryEmbeddingsConfig.from_hf_config(hf.rope_theta, scaling or None)
