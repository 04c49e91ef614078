"""A model of a published shape with random weights, and a tokenizer that is trained on Python's own
source files: what a run of that size needs, without a download.

    python -m bench.random_model bench/shapes/qwen3-0.6b.json runs/models/qwen3-0.6b

The vocabulary of the model is larger than the tokenizer's, as that of every published Qwen is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from haliax import Axis
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from streamrl.learner.files.export import named_tensors
from streamrl.learner.model.families import levanter_config, to_transformers_v4
from streamrl.learner.parallel.mesh import use_mesh

TOKENS = 32_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
DEVIATION = 0.02  # of the weights of a model that nobody has trained, as Qwen3's config says
SHARD_BYTES = 1 << 29
# Each message between its marks, with its role in the first line. Reasoning is dropped from answers
# before the last question, as Qwen3's template does.
CHAT_TEMPLATE = """\
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set state = namespace(seen=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set state.seen = state.seen + 1 -%}{%- endif -%}
{%- set text = message.content -%}
{%- if message.role == 'assistant' and state.seen < questions | length -%}
{%- set text = text.split('</think>') | last | trim('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""


def write(shape: Path, directory: Path, seed: int = 0) -> Path:
    """Write the model whose config.json is `shape` to `directory`, in Hugging Face layout, unless
    it is there. Its weights are of bfloat16. Returns the directory.
    """
    if directory.exists():
        return directory
    temporary = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer = trained_tokenizer()
    tokenizer.save_pretrained(temporary)
    config = json.loads(shape.read_text())
    config["eos_token_id"] = tokenizer.eos_token_id
    config["pad_token_id"] = tokenizer.pad_token_id
    (temporary / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(temporary, tensor_shapes(config), seed)
    return temporary.rename(directory)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a model, by its Hugging Face name. Nothing is allocated."""
    hf = to_transformers_v4(config)
    ours = levanter_config(hf, hf.max_position_embeddings)

    def tensors() -> dict[str, jax.Array]:
        vocabulary = Axis("vocab", hf.vocab_size)
        return named_tensors(ours.model_type.init(vocabulary, ours, key=jax.random.PRNGKey(0)))

    with use_mesh():
        return {name: found.shape for name, found in jax.eval_shape(tensors).items()}


def write_weights(directory: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Draw the tensors, and write them in files of about half a gigabyte with an index."""
    files: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, directory / name)
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in drawn(shapes, seed):
        shard[name] = tensor
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor: ones for the scale of a norm, otherwise normal."""
    draw = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensor = np.ones(shape, np.float32)
        else:
            tensor = draw.standard_normal(shape, np.float32)
            tensor *= DEVIATION
        yield name, tensor.astype(ml_dtypes.bfloat16)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 32,000 tokens, trained on the standard library of this Python."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train([str(path) for path in sources], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=Path, help="config.json of the model")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    print(write(options.shape, options.directory))


if __name__ == "__main__":
    main()
