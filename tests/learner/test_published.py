"""Published models of every family, by their own settings files, with two layers and random
weights: what the learner computes is what transformers does with the same directory, and what
transformers and vLLM do with the export.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.learner.initial import tiny_tokenizer
from streamrl.learner.model import model
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system.errors import ModelError
from tests.learner.model.test_families import plain, says, through
from tests.learner.plain_llama import log_softmax
from tests.learner.plain_transformers import CONTEXT

PUBLISHED = Path(__file__).parent / "published"
UNSUPPORTED = {
    "gemma-3-1b-it": (
        r"local and global layers have different rotary bases \(rope_local_base_freq, rope_theta\):"
        " Levanter has one for all layers"
    )
}
"""Published models of a family in docs/models.md that are refused, with the reason."""
NAMES = sorted(
    path.parent.name
    for path in PUBLISHED.glob("*/config.json")
    if path.parent.name not in UNSUPPORTED
)
TOKENIZERS = sorted(path.parent.name for path in PUBLISHED.glob("*/tokenizer_config.json"))
HEAD_DIM = 32  # vLLM on a CPU has no kernel for less.
END = 2


def two_layers(published: dict[str, Any]) -> dict[str, Any]:
    """The settings of a published config.json with other sizes and token ids, and no more or fewer
    settings than it has.
    """
    heads = published["num_attention_heads"]
    shared = published["num_key_value_heads"]
    small = {
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": {1: 1, heads: 4}.get(shared, 2),
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": HEAD_DIM,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": END if isinstance(published["eos_token_id"], int) else [END, 3],
    }
    is_wide = published.get("head_dim", 0) * heads not in (0, published["hidden_size"])
    small["hidden_size"] = 64 if is_wide else 4 * HEAD_DIM
    return {name: small.get(name, value) for name, value in published.items()}


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with use_mesh():
        yield


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each published model, and NAME-v5 as transformers 5 writes it; not to be
    written to.
    """
    return write_origins(tmp_path_factory.mktemp("published"), NAMES)


def write_origins(root: Path, names: list[str]) -> Path:
    """Write a directory of each published model, and NAME-v5, below `root`, and return `root`."""
    for name in names:
        directory = root / name
        shutil.copytree(PUBLISHED / name, directory)
        config = two_layers(json.loads((directory / "config.json").read_text()))
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "generation_config.json").unlink(missing_ok=True)
        tiny_tokenizer("0123456789+=").save_pretrained(directory)
    plain("fill", *(root / name for name in names))
    return root


def check(origins: Path, out: Path, names: list[str]) -> None:
    """The learner's logits are transformers' on the origin and on the export."""
    ours = {name: through(origins, out / f"{name}-export", name) for name in names}
    plain("float32", out, *(origins / name for name in names))
    plain("logits", out, *(out / f"{name}-export" for name in names))
    for name in names:
        for theirs in (np.load(out / f"{name}.npy"), np.load(out / f"{name}-export.npy")):
            assert np.ptp(theirs, axis=1).min() > 0.5, "a model that says nothing proves nothing"
            np.testing.assert_allclose(ours[name], theirs, atol=1e-4, err_msg=name)


def test_a_published_model_is_computed_as_transformers_does(origins: Path, tmp_path: Path):
    check(origins, tmp_path, NAMES)


@pytest.mark.slow
def test_so_is_a_published_model_as_transformers_5_writes_it(origins: Path, tmp_path: Path):
    check(origins, tmp_path, [f"{name}-v5" for name in NAMES])


@pytest.mark.slow
def test_vllm_computes_the_export_of_a_published_model(origins: Path, tmp_path: Path):
    ours = {name: through(origins, tmp_path / name, name) for name in NAMES}
    plain("vllm", tmp_path, *(tmp_path / name for name in NAMES))
    off = {
        name: float(np.abs(np.load(tmp_path / f"vllm-{name}.npy") - log_softmax(logits)[:-1]).max())
        for name, logits in ours.items()
    }
    print({name: f"{distance:.1e}" for name, distance in off.items()})
    assert max(off.values()) <= 1e-4, off


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_published_model_that_is_not_supported_is_refused_in_a_line(
    name: str, tiny: Path, tmp_path: Path
):
    directory = tmp_path / name
    shutil.copytree(tiny, directory)
    shutil.copyfile(PUBLISHED / name / "config.json", directory / "config.json")
    with pytest.raises(ModelError, match=f"^model directory {directory}: {UNSUPPORTED[name]}$"):
        model.load(directory, CONTEXT)


def test_the_mixture_of_experts_comes_in_shards(origins: Path):
    index = json.loads((origins / "qwen3-30b-a3b" / "model.safetensors.index.json").read_text())
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in index["weight_map"]
    assert len(set(index["weight_map"].values())) > 2
    assert says(model.load(origins / "qwen3-30b-a3b", CONTEXT)).shape[1] == 16


@pytest.mark.parametrize(
    "name", [name for name in NAMES if (PUBLISHED / name / "tokenizer_config.json").exists()]
)
def test_a_published_tokenizer_config_is_read(name: str, tiny: Path, tmp_path: Path):
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    shutil.copyfile(PUBLISHED / name / "tokenizer_config.json", directory / "tokenizer_config.json")
    (directory / "special_tokens_map.json").unlink(missing_ok=True)
    tokenizer = model.load_tokenizer(directory)
    written = json.loads((directory / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer.eos_token == (written if isinstance(written, str) else written["content"])
    assert tokenizer.convert_tokens_to_ids("7") == 11 and tokenizer.chat_template
