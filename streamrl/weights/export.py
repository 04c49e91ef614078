"""A Levanter model to a Hugging Face directory that vLLM loads: safetensors, and the settings and tokenizer of the model it started from."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from haliax.state_dict import to_torch_compatible_state_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

WEIGHTS = "model.safetensors"
CARRIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")


def state_dict(model: Any) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names. `lm_head.weight` is always among them: on a CPU, vLLM keeps the head it started with when it is missing."""
    tensors = dict(to_torch_compatible_state_dict(model))
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    return tensors


def save_weights(model: Any, directory: Path) -> None:
    """Write the weights alone. The same weights give the same bytes: tensors lie in the order of their names."""
    tensors = state_dict(model)
    try:
        save_file({name: tensors[name] for name in sorted(tensors)}, directory / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        if "os error 28" in str(error):  # it hides what the operating system said
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / WEIGHTS)) from None
        raise


def save(model: Any, origin: Path, directory: Path) -> None:
    """Write weights, settings and tokenizer: a directory that starts a server."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in CARRIED:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)
    save_weights(model, directory)
