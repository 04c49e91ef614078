"""A Levanter model to a Hugging Face directory that vLLM loads: safetensors, and the settings and tokenizer of the model it started from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from haliax.state_dict import to_torch_compatible_state_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

WEIGHTS, CONFIG, HEAD, EMBEDDING = "model.safetensors", "config.json", "lm_head.weight", "model.embed_tokens.weight"
HEADLESS = ("gemma2",)  # vLLM's has no head of its own, and reads the embedding every time
CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def state_dict(model: Any, head: bool = True) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names. The `head` is always among them: on a CPU, vLLM keeps the one it started with when it is missing."""
    tensors = dict(to_torch_compatible_state_dict(model))
    if head and HEAD not in tensors:
        tensors[HEAD] = tensors[EMBEDDING].copy()
    return tensors


def size_bytes(model: Any) -> int:
    """About what an export takes: the parameters, without the tokenizer."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model) if hasattr(leaf, "nbytes"))


def save_weights(model: Any, directory: Path, head: bool = True) -> None:
    """Write the weights alone. The same weights give the same bytes: tensors lie in the order of their names. Raises OSError."""
    tensors = state_dict(model, head)
    try:
        save_file({name: tensors[name] for name in sorted(tensors)}, directory / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        if told := re.search(r"os error (\d+)", str(error)):  # it hides what the operating system said in its text
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(directory / WEIGHTS)) from None
        raise


def save(model: Any, origin: Path, directory: Path) -> None:
    """Write weights, settings and tokenizer: a directory that starts a server. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in CARRIED:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)
    settings = described(json.loads((origin / CONFIG).read_text()))
    (directory / CONFIG).write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    save_weights(model, directory, head=settings.get("model_type") not in HEADLESS)


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model (config.json) as they are of what is written: float32, and with a head, which is to be read."""
    tied = {} if settings.get("model_type") in HEADLESS else {"tie_word_embeddings": False}
    return {**settings, **tied, **{name: "float32" for name in ("dtype", "torch_dtype") if settings.get(name)}}
