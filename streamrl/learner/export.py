"""A Levanter model to a Hugging Face directory that vLLM loads: safetensors, and the settings and
tokenizer of the model it started from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax.jax_utils import is_jax_array_like
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from jax.experimental.multihost_utils import process_allgather

from streamrl.weights.manifest import CARRIED, CONFIG, INDEX, at_once

WEIGHTS, HEAD, EMBEDDING = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight"
SHARDS, SHARD_BYTES = 8, 16 << 20  # files that a large model is at most, and what each has at least
DTYPES = {"float32": "F32"}  # a policy is trained in this
HEADLESS = ("gemma2",)  # vLLM's has no head of its own, and reads the embedding every time


@eqx.filter_jit
def _named(model: Any) -> dict[str, jax.Array]:
    """Tensors by their Hugging Face names. One program: layers lie stacked, and cutting them one by
    one takes longer than a small model's writing.

    Each is a copy, also one that is cut out of nothing: the next step of training takes the memory
    of the model for its own.
    """
    return {
        name: jnp.copy(tensor)
        for name, tensor in to_state_dict(
            flatten_modules_for_export(eqx.filter(model, is_jax_array_like))
        ).items()
    }


def state_dict(model: Any) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names, in memory of their own. The processes of a learner come
    to it together: each has its part.
    """
    return {
        name: np.asarray(process_allgather(tensor, tiled=True))
        for name, tensor in _named(model).items()
    }


def size_bytes(tensors: Mapping[str, np.ndarray]) -> int:
    """About what an export takes: the parameters, without the tokenizer."""
    return sum(tensor.nbytes for tensor in tensors.values())


def save_weights(tensors: Mapping[str, np.ndarray], directory: Path, head: bool = True) -> None:
    """Write the weights alone. The same weights give the same bytes: tensors lie in the order of
    their names. Raises OSError.

    `head`: it is always among them; on a CPU, vLLM keeps the one it started with when it is
    missing.
    """
    if head and HEAD not in tensors:
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}
    files = shards({name: tensors[name].nbytes for name in sorted(tensors)})
    at_once(
        lambda file: write_tensors(directory / file, {name: tensors[name] for name in files[file]}),
        files,
    )
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def shards(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The tensors of each file, by its name, as Hugging Face calls them. A small model is one file,
    a large one SHARDS of about the same size: several can be written, hashed and copied at a time.

    `sizes`: bytes of each tensor; they stay in this order.
    """
    total, gone = sum(sizes.values()), 0
    count, cut = min(max(total // SHARD_BYTES, 1), SHARDS), list[list[str]]()
    for name, size in sizes.items():
        if gone * count >= len(cut) * total:
            cut.append([])
        cut[-1].append(name)
        gone += size
    return (
        {WEIGHTS: cut[0]}
        if len(cut) == 1
        else {
            f"model-{i:05d}-of-{len(cut):05d}.safetensors": names for i, names in enumerate(cut, 1)
        }
    )


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, as its own library writes it, without the copies in memory that this
    makes. Raises OSError.
    """
    described, end = dict[str, Any]({"__metadata__": {"format": "pt"}}), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        described[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)


def save(tensors: Mapping[str, np.ndarray], origin: Path, directory: Path) -> None:
    """Write weights, settings and tokenizer: a directory that starts a server. Raises OSError.

    `tensors`: of `state_dict`. `origin`: the directory that the model was loaded from.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in CARRIED:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)
    settings = described(json.loads((origin / CONFIG).read_text()))
    (directory / CONFIG).write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    save_weights(tensors, directory, head=settings.get("model_type") not in HEADLESS)


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model (config.json) as they are of what is written: float32, and with a
    head, which is to be read.
    """
    tied = {} if settings.get("model_type") in HEADLESS else {"tie_word_embeddings": False}
    # a server refuses it, for it has Python code loaded
    without_code = {name: value for name, value in settings.items() if name != "auto_map"}
    return {
        **without_code,
        **tied,
        **{name: "float32" for name in ("dtype", "torch_dtype") if settings.get(name)},
    }
