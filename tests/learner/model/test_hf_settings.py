"""Settings of config.json files as transformers 4, transformers 5 and converters write them."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.learner.model.hf_settings import UnsupportedSetting, check_settings, with_plain_rope

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def check(**changes: Any) -> None:
    check_settings({**LLAMA, **changes}, "LlamaForCausalLM")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096},
        {"attention_bias": None, "partial_rotary_factor": 1, "logit_scale": 1.0},
        {"head_dim": None, "sliding_window": None, "rope_scaling": None, "layer_types": None},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 128},
        {"quantization_config": None, "compression_config": {}},
        {"architectures": None},
        {"unheard_of": {"by": "the learner"}},
    ],
)
def test_what_is_published_is_accepted(changes: dict[str, Any]):
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, 'hidden_size is "64"; input should be a valid integer'),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; input should be greater than 0"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; input should be less than",
        ),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"; input should be a val'),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is null; input should be a valid boo"),
        ({"use_sliding_window": "no"}, 'use_sliding_window is "no"; input should be a valid bool'),
        ({"sliding_window": 4096.5}, "sliding_window is 4096.5; input should be a valid integer"),
        (
            {"sliding_window": [4096]},
            r"sliding_window is \[4096\]; input should be a valid integer",
        ),
        ({"sliding_window": 0}, "sliding_window is 0; input should be greater than 0"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0; input should be greater"),
        ({"final_logit_softcapping": False}, "final_logit_softcapping is false; input should be"),
        ({"layer_types": "full_attention"}, 'layer_types is "full_attention"; input should be a'),
        (
            {"layer_types": ["chunked_attention"]},
            "layer_types has 'chunked_attention', which is not",
        ),
        (
            {"rope_scaling": "linear"},
            'rope_scaling is "linear"; input should be a valid dictionary',
        ),
        ({"hidden_act": 3}, "hidden_act is 3; input should be a valid string"),
        ({"mlp_bias": True}, "mlp_bias is true and is not supported; it must be false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 and is not supported; it"),
        ({"logit_scale": 0.0625}, "logit_scale is 0.0625 and is not supported; it must be 1.0"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads is 4 and num_key_value_heads is 3: the first must be a multiple",
        ),
        (
            {"num_attention_heads": 6},
            "hidden_size is 64 and num_attention_heads is 6: without head_dim, the first must be",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures names LlamaForSequenceClassification; a llama that can be",
        ),
        (
            {"architectures": ["LlamaModel"]},
            "architectures names LlamaModel; a llama that can be trained is a LlamaForCausalLM",
        ),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8"; input should be a valid'),
    ],
)
def test_a_setting_that_would_be_computed_wrongly_is_refused_by_name(
    changes: dict[str, Any], message: str
):
    with pytest.raises(UnsupportedSetting, match=f"^{message}"):
        check(**changes)


@pytest.mark.parametrize(
    ("setting", "value", "method"),
    [
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "awq"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsan"),
        ("quantization_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization_config", {"bits": 4}, "unknown"),
        ("compression_config", {"quant_method": "sparseml"}, "sparseml"),
    ],
)
def test_quantized_weights_are_refused_by_their_method(
    setting: str, value: dict[str, Any], method: str
):
    with pytest.raises(UnsupportedSetting, match=f"^{setting} names the method '{method}"):
        check(**{setting: value})


LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OLD_LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("given", "theta", "scaling"),
    [
        ({}, None, None),  # None: the default of the family.
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 1e5, "rope_scaling": OLD_LINEAR}, 1e5, OLD_LINEAR),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5, LLAMA3),
        # Written by tools in the change from transformers 4 to 5: the base is next to the rest.
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_parameters": LINEAR}, 5e5, LINEAR),
        ({"rope_theta": 5e5, "rope_parameters": {**LINEAR, "rope_theta": 1e6}}, 1e6, LINEAR),
        ({"rope_theta": 5e5, "rope_parameters": None}, 5e5, None),
        # transformers 5 reads rope_scaling first, and its base.
        ({"rope_scaling": {**LINEAR, "rope_theta": 1e6}}, 1e6, LINEAR),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, None, LINEAR),
        # The same for every type of layer.
        ({"rope_theta": 5e5, "rope_parameters": {"full_attention": LINEAR}}, 5e5, LINEAR),
        (
            {
                "rope_theta": 5e5,
                "layer_types": ["full_attention"] * 2,
                "rope_parameters": {"full_attention": LINEAR, "sliding_attention": OLD_LINEAR},
            },
            5e5,
            LINEAR,
        ),
    ],
)
def test_rotary_settings_are_read_as_transformers_5_reads_them(
    given: dict[str, Any], theta: float | None, scaling: dict[str, Any] | None
):
    plain = with_plain_rope({**LLAMA, **given})
    assert (plain.get("rope_theta"), plain["rope_scaling"]) == (theta, scaling)
    assert "rope_parameters" not in plain


@pytest.mark.parametrize(
    ("given", "bases"),
    [
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, (1e6, 1e4)),
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            (1e6, 1e4),
        ),
        (
            {
                "rope_theta": 3.0,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e3},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
                },
            },
            (5e3, 5e3),
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5e3}}}, (5e3, 5e3)),
    ],
)
def test_a_gemma_3_has_a_base_for_each_type_of_layer(
    given: dict[str, Any], bases: tuple[float, float]
):
    plain = with_plain_rope({"model_type": "gemma3_text", **given})
    assert (plain["rope_theta"], plain["rope_local_base_freq"]) == bases


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not supported; default, linear, llama3, yarn are",
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            "rotary embeddings have factor and no rope_type",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
            "rotary embeddings have rope_type 'yarn' and type 'linear'; take the wrong one out",
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "rotary embeddings of type linear need a number above 0 as factor, not null",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": "4"}},
            'rotary embeddings of type llama3 need a number above 0 as high_freq_factor, not "4"',
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
            "rotary embeddings of type default need a number above 0 as rope_theta, not -1",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.25 and is not supported; it must be 1.0",
        ),
        (
            {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}},
            "rope_parameters of full_attention and sliding_attention differ: Levanter has one",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            "rope_parameters of full_attention and sliding_attention differ: Levanter has one",
        ),
    ],
)
def test_rotary_settings_that_levanter_does_not_compute_are_refused(
    given: dict[str, Any], message: str
):
    with pytest.raises(UnsupportedSetting, match=f"^{message}"):
        with_plain_rope({**LLAMA, **given})
