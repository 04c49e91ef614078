"""The tensors that a model directory holds, read from the headers of its files alone, and whether
they are those of the model that its config.json describes.

Levanter reads the tensors that it has layers for, as whatever they are. So what is incomplete,
quantized or left over is found here, before anything is loaded, and named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.jax_utils import is_jax_array_like
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from safetensors import SafetensorError, safe_open

from streamrl.system.errors import ModelError
from streamrl.system.text import one_line
from streamrl.weights.manifest import ADAPTER, CONFIG, INDEX, TOKENIZER_FILES

WEIGHTS = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"  # Levanter would read it before WEIGHTS.
FLOATS = ("F64", "F32", "F16", "BF16")
POINTER = b"version https://git-lfs"  # The first bytes of a file that Git LFS has not fetched.
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Tensors of a published model that no layer computes with: constants of old llamas, and the head of
# a model whose head is its embedding.
CONSTANT = ".rotary_emb.inv_freq"
HEAD = "lm_head.weight"
# Files that other tools leave next to quantized weights.
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


class StoredTensor(NamedTuple):
    """A tensor, as the header of its file describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as BF16


def check_files(directory: Path) -> None:
    """Check that config, tokenizer and weights are files, and none of them a pointer of Git LFS or
    a sign of quantized weights. Raises ModelError.
    """
    for name in QUANTIZATION_FILES:
        if (directory / name).is_file():
            raise _unusable(
                directory,
                f"{name} is of quantized weights, which cannot be trained or scored; give the model"
                " in bfloat16, or take that file away if the weights are not quantized",
            )
    names = [CONFIG, INDEX, *TOKENIZER_FILES]
    paths = [directory / name for name in names if (directory / name).exists()]
    for path in [*paths, *sorted(directory.glob("*.safetensors"))]:
        try:
            with path.open("rb") as file:
                start = file.read(len(POINTER))
        except OSError as error:
            raise _unusable(directory, f"{path.name} cannot be read ({error.strerror})") from None
        if start == POINTER:
            raise _unusable(
                directory,
                f"{path.name} is a pointer of Git LFS and not the file; fetch it with `git lfs"
                " pull`, or name the model on the hub",
            )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model, by name. Raises ModelError that names the file for weights that are
    missing, truncated or not safetensors.
    """
    index = _read_index(directory)
    files = _files_of(directory, index)
    tensors = dict[str, StoredTensor]()
    for file in files:
        tensors |= _header(directory, file)
    for name, file in index.items():
        if name not in tensors:
            raise _unusable(
                directory, f"{file} has no tensor {name}, although {INDEX} places it there"
            )
    return tensors


def check_tensors(
    directory: Path, config: Any, vocab_size: int, stored: Mapping[str, StoredTensor]
) -> None:
    """Check that the tensors are those of the model, no less and no more. Raises ModelError.

    `config`: Levanter's config of the model. `vocab_size`: rows of its embedding.
    """
    for name, tensor in stored.items():
        if tensor.dtype not in FLOATS and not name.endswith(CONSTANT):
            raise _unusable(
                directory,
                f"{name} in {tensor.file} is of type {tensor.dtype}: quantized weights cannot be"
                " trained or scored; give the model in bfloat16",
            )
    expected = expected_shapes(config, vocab_size)
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            raise _unusable(
                directory, f"its weights have no tensor {name}, which {CONFIG} asks for"
            )
        if tensor.shape != shape:
            raise _unusable(
                directory,
                f"{name} in {tensor.file} has the shape {tensor.shape}, and by {CONFIG} it is"
                f" {shape}",
            )
    left = [
        name
        for name in sorted(stored.keys() - expected.keys())
        if not name.endswith(CONSTANT) and not (name == HEAD and config.tie_word_embeddings)
    ]
    if left:
        others = f" and {len(left) - 1} others" if len(left) > 1 else ""
        raise _unusable(
            directory,
            f"{left[0]} in {stored[left[0]].file}{others} would not be read: by {CONFIG} the model"
            " has no such tensor",
        )


def check_finite(directory: Path, model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Check that a loaded model has no NaN and no infinity. Raises ModelError, which names the
    first tensor that has.
    """
    arrays = eqx.filter(model, is_jax_array_like)
    if all(_is_finite(leaf) for leaf in jax.tree.leaves(arrays)):
        return
    tensors = to_state_dict(flatten_modules_for_export(arrays), None)
    name = next(name for name, tensor in tensors.items() if not _is_finite(tensor))
    raise _unusable(
        directory,
        f"{name} in {stored[name].file} has NaN or infinity; convert the weights again, or take an"
        " earlier checkpoint",
    )


def _is_finite(tensor: jax.Array) -> bool:
    return bool(jnp.isfinite(tensor).all())


def expected_shapes(config: Any, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by their Hugging Face names. Nothing is computed."""

    def tensors(key: jax.Array) -> dict[str, jax.Array]:
        model = config.model_type.init(Axis("vocab", vocab_size), config, key=key)
        arrays = eqx.filter(model, is_jax_array_like)
        return to_state_dict(flatten_modules_for_export(arrays), None)

    shaped = eqx.filter_eval_shape(tensors, jax.random.PRNGKey(0))
    return {name: tuple(tensor.shape) for name, tensor in shaped.items()}


def _files_of(directory: Path, index: Mapping[str, str]) -> list[str]:
    """The names of the files with weights. Raises ModelError."""
    if index:
        files = sorted(set(index.values()))
        for file in files:
            if not (directory / file).is_file():
                raise _unusable(directory, f"{file} is missing, although {INDEX} names it")
        return files
    if (directory / PICKLED_INDEX).exists():
        raise _unusable(
            directory,
            f"{PICKLED_INDEX} names pickled weights, which are not read; take it away, or convert"
            " them with save_pretrained(safe_serialization=True)",
        )
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if any(SHARD.fullmatch(name) for name in others):
        raise _unusable(
            directory, f"{INDEX} is missing, which tells where the tensors of {others[0]} belong"
        )
    if ADAPTER in others:
        raise _unusable(
            directory, f"{ADAPTER} is an adapter; give a model that it has been merged into"
        )
    found = f"; {others[0]} is in another layout" if others else ""
    raise _unusable(directory, f"{WEIGHTS} is missing{found}")


def _read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor, by its name, or nothing if all weights are in one file."""
    path = directory / INDEX
    if not path.exists():
        return {}
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(directory, f"{INDEX} cannot be read ({one_line(error)})") from None
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise _unusable(directory, f"{INDEX} has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise _unusable(directory, f"{INDEX} names {file!r}, which is no file next to it")
    return files


def _header(directory: Path, file: str) -> dict[str, StoredTensor]:
    try:
        with safe_open(directory / file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file, tuple(slice.get_shape()), slice.get_dtype())
                for name, slice in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise _unusable(
            directory,
            f"{file} is not whole, or no safetensors file ({one_line(error)}); fetch it again",
        ) from None


def _unusable(directory: Path, what: str) -> ModelError:
    return ModelError(f"model directory {directory}: {what}")
