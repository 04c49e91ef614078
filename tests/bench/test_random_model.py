"""A model of a given shape is one that the learner loads."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from bench import random_model
from streamrl.learner.model import model
from streamrl.learner.parallel.mesh import use_mesh

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}


def test_a_random_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random_model, "TOKENS", 300)
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    directory = random_model.write(shape, tmp_path / "model")
    assert model.vocab_size(directory) == 300
    with use_mesh():
        assert model.load(directory, 64).Vocab.size == 512
    with safe_open(directory / "model-00001.safetensors", "numpy") as file:
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    question = [{"role": "user", "content": "1 + 1?"}]
    asked = model.load_tokenizer(directory).apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
