"""A small mixture of experts in a directory in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from haliax import Axis
from safetensors.numpy import save_file

from streamrl.learner.files import export
from streamrl.learner.initial import tiny_tokenizer
from streamrl.learner.model.families import levanter_config, to_transformers_v4

CONTEXT = 32
LAYERS = 2
EXPERTS = 6
CHOSEN = 2
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def write(directory: Path) -> Path:
    """Must be called inside a mesh. Its router is sure of little: some tokens are close calls."""
    config = levanter_config(to_transformers_v4(CONFIG), CONTEXT)
    made = config.build(Axis("vocab", CONFIG["vocab_size"]), key=jax.random.PRNGKey(0))
    tensors = export.state_dict(made)
    draws = np.random.default_rng(0)
    drawn = {
        name: (array + 0.3 * draws.normal(size=array.shape)).astype(np.float32)
        for name, array in tensors.items()
    }
    tiny_tokenizer("0123456789+=").save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(drawn, directory / "model.safetensors", {"format": "pt"})
    return directory
