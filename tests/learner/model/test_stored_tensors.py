"""Model directories that are not whole, are quantized, or hold more than the model reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.learner.files import export
from streamrl.learner.model import model
from streamrl.learner.model.stored_tensors import StoredTensor, stored_tensors
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system.errors import ModelError
from tests.learner.conftest import CONTEXT

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 988097824\n"


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with use_mesh():
        yield


@pytest.fixture
def directory(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be written to."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def with_tensors(directory: Path, **tensors: Any) -> None:
    """Add tensors, or replace them. `__` in a name is a dot. None removes one."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    merged = {**load_file(directory / WEIGHTS), **named}
    save_file({name: t for name, t in merged.items() if t is not None}, directory / WEIGHTS)


def in_shards(directory: Path) -> None:
    """Cut the weights into two files, with an index."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    half = len(names) // 2
    save_file({name: tensors[name] for name in names[:half]}, directory / FIRST)
    save_file({name: tensors[name] for name in names[half:]}, directory / SECOND)
    files = {name: FIRST if names.index(name) < half else SECOND for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(directory: Path) -> str:
    """What the learner says to the directory, without its name."""
    with pytest.raises(ModelError) as caught:
        model.load(directory, CONTEXT)
    before = f"model directory {directory}: "
    assert str(caught.value).startswith(before) and "\n" not in str(caught.value)
    return str(caught.value).removeprefix(before)


def test_the_headers_of_all_shards_are_read(directory: Path):
    whole = stored_tensors(directory)
    in_shards(directory)
    cut = stored_tensors(directory)
    assert cut[f"{Q_PROJ}.weight"] == StoredTensor(FIRST, (32, 32), "F32")
    assert {name: tensor.shape for name, tensor in cut.items()} == {
        name: tensor.shape for name, tensor in whole.items()
    }
    loaded = export.state_dict(model.load(directory, CONTEXT))
    assert loaded.keys() == whole.keys()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_pointer_of_git_lfs_is_not_taken_for_the_file(directory: Path, name: str):
    (directory / name).write_text(POINTER)
    assert refusal(directory).startswith(f"{name} is a pointer of Git LFS and not the file; fetch")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_with_a_value_that_is_no_number_is_named(directory: Path, value: float):
    weight = load_file(directory / WEIGHTS)[f"{Q_PROJ}.weight"]
    weight[3, 5] = value
    with_tensors(directory, **{f"{Q_PROJ}.weight": weight})
    assert refusal(directory).startswith(f"{Q_PROJ}.weight in {WEIGHTS} has NaN or infinity")


def test_a_missing_shard_is_named(directory: Path):
    in_shards(directory)
    (directory / SECOND).unlink()
    assert refusal(directory) == f"{SECOND} is missing, although {INDEX} names it"


def test_shards_without_an_index_are_refused(directory: Path):
    in_shards(directory)
    (directory / INDEX).unlink()
    assert refusal(directory).startswith(f"{INDEX} is missing, which tells where")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", f"{INDEX} cannot be read (Expecting property name"),
        ("[]", f"{INDEX} has no weight_map"),
        ('{"weight_map": {}}', f"{INDEX} has no weight_map"),
        ('{"weight_map": {"a": 3}}', f"{INDEX} names 3, which is no file next to it"),
        ('{"weight_map": {"a": "../b"}}', f"{INDEX} names '../b', which is no file next to it"),
        (
            f'{{"weight_map": {{"left.out": "{WEIGHTS}"}}}}',
            f"{WEIGHTS} has no tensor left.out, although {INDEX} places it there",
        ),
    ],
)
def test_an_index_that_does_not_describe_the_files_is_refused(
    directory: Path, content: str, message: str
):
    (directory / INDEX).write_text(content)
    assert refusal(directory).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "consolidated.safetensors",
            f"{WEIGHTS} is missing; consolidated.safetensors is in another layout",
        ),
        (
            "adapter_model.safetensors",
            "adapter_model.safetensors is an adapter; give a model that it has been merged into",
        ),
    ],
)
def test_weights_in_another_layout_are_refused(directory: Path, name: str, message: str):
    (directory / WEIGHTS).rename(directory / name)
    assert refusal(directory) == message


def test_an_index_of_pickled_weights_is_refused(directory: Path):
    (directory / "pytorch_model.bin.index.json").write_text("{}")
    assert refusal(directory).startswith("pytorch_model.bin.index.json names pickled weights, whi")


@pytest.mark.parametrize("size", [0, 7, 200, 4_000])
def test_a_truncated_file_is_named(directory: Path, size: int):
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(directory).startswith(f"{WEIGHTS} is not whole, or no safetensors file (")


def test_weights_that_are_a_directory_are_refused(directory: Path):
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).mkdir()
    assert refusal(directory) == f"{WEIGHTS} cannot be read (Is a directory)"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.int8, "I8"),
        (np.uint8, "U8"),
        (np.int32, "I32"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_quantized_tensors_are_refused_without_a_word_in_the_config(
    directory: Path, dtype: Any, name: str
):
    tensor = load_file(directory / WEIGHTS)[f"{Q_PROJ}.weight"]
    with_tensors(directory, **{f"{Q_PROJ}.weight": tensor.astype(dtype)})
    assert refusal(directory).startswith(
        f"{Q_PROJ}.weight in {WEIGHTS} is of type {name}: quantized weights cannot be trained or"
    )


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_of_a_quantizer_is_seen(directory: Path, name: str):
    (directory / name).write_text("{}")
    assert refusal(directory).startswith(f"{name} is of quantized weights, which cannot be trained")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{Q_PROJ}.bias", (32,)),
        (f"{Q_PROJ}.weight_scale", (32, 1)),
        ("score.weight", (1, 32)),
        ("model.layers.2.input_layernorm.weight", (32,)),
        ("model.mtp.0.weight", (32,)),
    ],
)
def test_a_tensor_that_no_layer_reads_is_refused(
    directory: Path, name: str, shape: tuple[int, ...]
):
    with_tensors(directory, **{name: np.ones(shape, np.float32)})
    assert refusal(directory) == (
        f"{name} in {WEIGHTS} would not be read: by config.json the model has no such tensor"
    )


def test_of_many_tensors_that_no_layer_reads_one_is_named(directory: Path):
    more = {f"{Q_PROJ}.{name}": np.ones(1, np.float32) for name in ("bias", "a", "b")}
    with_tensors(directory, **more)
    assert refusal(directory).startswith(f"{Q_PROJ}.a in {WEIGHTS} and 2 others would not be read")


def test_constants_and_the_head_of_a_tied_model_are_not_read(directory: Path):
    before = export.state_dict(model.load(directory, CONTEXT))
    edit_json(directory / "config.json", lambda config: config.update(tie_word_embeddings=True))
    constant = "model.layers.0.self_attn.rotary_emb.inv_freq"
    with_tensors(directory, **{constant: np.ones(8, np.float32)})
    after = export.state_dict(model.load(directory, CONTEXT))
    assert before.keys() - after.keys() == {"lm_head.weight"} and not after.keys() - before.keys()


def test_a_missing_tensor_is_named(directory: Path):
    with_tensors(directory, model__norm__weight=None)
    assert refusal(directory) == (
        "its weights have no tensor model.norm.weight, which config.json asks for"
    )


def test_a_tensor_of_another_shape_is_named_with_both(directory: Path):
    edit_json(directory / "config.json", lambda config: config.update(vocab_size=17))
    assert refusal(directory) == (
        f"lm_head.weight in {WEIGHTS} has the shape (16, 32), and by config.json it is (17, 32)"
    )
