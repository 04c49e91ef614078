"""Export of a Levanter model to a Hugging Face directory that vLLM loads: safetensors, with the
config and tokenizer of the initial model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax.jax_utils import is_jax_array_like
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from jax.experimental.multihost_utils import process_allgather

from streamrl.learner.files import weight_shards
from streamrl.learner.files.tensor_files import FLOAT32, write_tensors
from streamrl.learner.files.weight_shards import LocalWeights
from streamrl.learner.parallel.distributed import is_rank_zero
from streamrl.weights.files import parallel_map
from streamrl.weights.manifest import CONFIG, INDEX, tokenizer_files

WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# files that a large model is at most, and what each has at least
SHARDS = 8
SHARD_BYTES = 16 << 20
HEADLESS = ("gemma2",)  # vLLM's has no separate head, and reads the embedding every time


@eqx.filter_jit
def named_tensors(
    model: Any, prefix: str | None = None, dtype: np.dtype[Any] = FLOAT32
) -> dict[str, jax.Array]:
    """Tensors by their Hugging Face names, in one data type. It is one compiled program, because
    layers are stacked, and slicing them one by one takes longer than writing a small model.

    Each tensor is a copy, even if nothing was sliced, because the next training step donates the
    model's memory.
    """
    return {
        name: jnp.array(tensor, dtype, copy=True)
        for name, tensor in to_state_dict(
            flatten_modules_for_export(eqx.filter(model, is_jax_array_like)), prefix
        ).items()
    }


def state_dict(model: Any, prefix: str | None = None) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names, in float32 and in separate memory, for what is small
    or has one process. All processes of a learner call this together. Rank zero gets the tensors;
    the others get none, and hold one at a time. `prefix` is put before each name.
    """
    tensors = dict[str, np.ndarray]()
    for name, tensor in named_tensors(model, prefix).items():
        whole = process_allgather(tensor, tiled=True)
        if is_rank_zero():
            tensors[name] = np.asarray(whole)
    return tensors


def local_weights(model: Any, head: bool = True, dtype: np.dtype[Any] = FLOAT32) -> LocalWeights:
    """The weights of a model, of which this process has copied its shards. All processes of a
    learner call this together. `head`: as for `save_weights`. `dtype`: that they are written in.
    """
    tensors = named_tensors(model, dtype=dtype)
    sources = {HEAD: EMBEDDING} if head and HEAD not in tensors else {}
    sizes = {name: tensors[sources.get(name, name)].nbytes for name in [*tensors, *sources]}
    files = split_into_files({name: sizes[name] for name in sorted(sizes)})
    return weight_shards.local_weights(tensors, files, sources)


def save_weights(tensors: Mapping[str, np.ndarray], directory: Path, head: bool = True) -> None:
    """Write the weights of a whole model alone. The same weights give the same bytes, because
    tensors are ordered by name. Raises OSError.

    `head`: write the head even if it is tied to the embedding. Without it, vLLM on a CPU would keep
    the head that it was started with.
    """
    if head and HEAD not in tensors:
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}
    files = split_into_files({name: tensors[name].nbytes for name in sorted(tensors)})
    parallel_map(
        lambda file: write_tensors(
            directory / file,
            {name: tensors[name].shape for name in files[file]},
            tensors.__getitem__,
        ),
        files,
    )
    _write_index(files, sum(tensor.nbytes for tensor in tensors.values()), directory)


def _write_index(files: Mapping[str, Sequence[str]], size_bytes: int, directory: Path) -> None:
    """Write which tensor is in which file, if there are several. `size_bytes`: of all tensors."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": size_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def split_into_files(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The names of the tensors in each file, by the file's Hugging Face name. A small model is one
    file. A large one is up to SHARDS files of similar size, so that several can be written, hashed
    and copied in parallel.

    `sizes`: bytes of each tensor. The order is kept.
    """
    total = sum(sizes.values())
    gone = 0
    count = min(max(total // SHARD_BYTES, 1), SHARDS)
    cut = list[list[str]]()
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


def save(tensors: Mapping[str, np.ndarray], origin: Path, directory: Path) -> None:
    """Write weights, config and tokenizer: a directory that a server can load. Raises OSError.

    `tensors`: of the whole model, from `state_dict`. `origin`: the directory that the model was
    loaded from.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_settings(origin, directory, FLOAT32)
    save_weights(tensors, directory, head=has_head(origin))


def save_settings(weights: LocalWeights, origin: Path, directory: Path) -> None:
    """Write the files other than the weights. `origin`: as for `save`. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_settings(origin, directory, weights.dtype)
    _write_index(weights.files, weights.size_bytes, directory)


def has_head(origin: Path) -> bool:
    """Whether the export of a model has a separate head. `origin`: as for `save`."""
    return json.loads((origin / CONFIG).read_text()).get("model_type") not in HEADLESS


def _write_settings(origin: Path, directory: Path, dtype: np.dtype[Any]) -> None:
    """Write config and tokenizer of a model whose weights have that data type."""
    copy_files(origin, tokenizer_files(origin), directory)
    settings = export_config(json.loads((origin / CONFIG).read_text()), dtype)
    (directory / CONFIG).write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")


def copy_files(origin: Path, names: Sequence[str], directory: Path) -> None:
    """Copy files of a model directory. A name may have a directory in it. Raises OSError."""
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(origin / name, directory / name)


def export_config(settings: Mapping[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """The config.json of an export: its data type, and an untied head, which a server must read."""
    tied = {} if settings.get("model_type") in HEADLESS else {"tie_word_embeddings": False}
    # A server refuses auto_map, because it loads Python code.
    without_code = {name: value for name, value in settings.items() if name != "auto_map"}
    return {
        **without_code,
        **tied,
        **{name: dtype.name for name in ("dtype", "torch_dtype") if settings.get(name)},
    }
