from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.learner.model import model
from streamrl.learner.model.examples import RlExample
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system.errors import ModelError
from tests.learner import plain_llama
from tests.learner.conftest import CONTEXT
from tests.learner.examples import Segment, example

ROW = 48  # tokens: rows may be longer than the sequences that the model is for
ONE = [1, 8, 11, 15, 8, 11, 2]
TWO = [1, 4, 5, 6, 7, 8, 9, 10, 11, 15, 4, 2]
THREE = list(np.random.default_rng(0).integers(0, 16, CONTEXT))


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with use_mesh():
        yield


def predict(directory: Path, packed: RlExample) -> tuple[np.ndarray, np.ndarray]:
    logprobs, entropy = eqx.filter_jit(model.predict)(model.load(directory, CONTEXT), packed)
    assert logprobs.dtype == entropy.dtype == np.float32
    return np.asarray(logprobs), np.asarray(entropy)


def edited(
    origin: Path,
    directory: Path,
    settings: Callable[[dict[str, Any]], None],
    tensors: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A copy with other settings, and other tensors."""
    shutil.copytree(origin, directory)
    config = json.loads((directory / "config.json").read_text())
    settings(config)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        weights = load_file(directory / "model.safetensors")
        tensors(weights)
        save_file(weights, directory / "model.safetensors")
    return directory


def agrees_with_numpy(directory: Path) -> bool:
    logprobs, entropy = predict(directory, example([[Segment(THREE, 1)]], ROW))
    np.testing.assert_allclose(
        logprobs[0, : CONTEXT - 1], plain_llama.next_logprobs(directory, THREE), atol=2e-5
    )
    np.testing.assert_allclose(
        entropy[0, :CONTEXT], plain_llama.entropies(directory, THREE), atol=2e-5
    )
    return True


def test_packed_and_alone_are_equal(tiny: Path):
    """The shift of docs/design/logprobs.md: entry i is of token i + 1 of the same segment."""
    packed, _ = predict(
        tiny,
        example(
            [
                [Segment(ONE, 4), Segment(TWO, 9), Segment(ONE, 4)],
                [Segment(THREE, 1), Segment(TWO, 9)],
            ],
            ROW,
        ),
    )
    for row, start, tokens in (
        (0, 0, ONE),
        (0, 7, TWO),
        (0, 19, ONE),
        (1, 0, THREE),
        (1, CONTEXT, TWO),
    ):
        alone = np.asarray(
            eqx.filter_jit(model.predict)(
                model.load(tiny, CONTEXT), model.single_sequence(np.array(tokens))
            ).logprobs
        )[0, :-1]
        found = packed[row, start : start + len(tokens) - 1]
        np.testing.assert_allclose(found, alone, atol=1e-5)
        np.testing.assert_allclose(found, plain_llama.next_logprobs(tiny, tokens), atol=1e-5)


def test_each_segment_has_its_own_temperature(tiny: Path):
    sharp = edited(
        tiny,
        tiny.parent / "sharp",
        lambda c: None,
        lambda w: w.update({"lm_head.weight": w["lm_head.weight"] * 30}),
    )
    logprobs, entropy = predict(
        sharp,
        example(
            [
                [
                    Segment(ONE, 4, temperature=1.0),
                    Segment(ONE, 4, temperature=0.7),
                    Segment(TWO, 9, temperature=1.3),
                ]
            ],
            ROW,
        ),
    )
    assert np.abs(logprobs[0, :6] - logprobs[0, 7:13]).max() > 0.1
    for start, tokens, temperature in ((0, ONE, 1.0), (7, ONE, 0.7), (14, TWO, 1.3)):
        np.testing.assert_allclose(
            logprobs[0, start : start + len(tokens) - 1],
            plain_llama.next_logprobs(sharp, tokens, temperature),
            atol=2e-5,
        )
        np.testing.assert_allclose(
            entropy[0, start : start + len(tokens)],
            plain_llama.entropies(sharp, tokens, temperature),
            atol=2e-5,
        )


def test_a_model_written_by_transformers_5_keeps_its_rotary_base(tiny: Path, tmp_path: Path):
    def five(config: dict[str, Any]) -> None:
        del config["rope_theta"], config["rope_scaling"]
        config["rope_parameters"] = {"rope_theta": 100.0, "rope_type": "default"}

    assert agrees_with_numpy(edited(tiny, tmp_path / "five", five))


def test_heads_may_be_wider_and_shared(tiny: Path, tmp_path: Path):
    """Two query heads for one of keys, each of 32 where hidden / heads is 16."""

    def reshape(weights: dict[str, np.ndarray]) -> None:
        rng = np.random.default_rng(0)
        for layer in range(2):
            for name, shape in (("q", (64, 32)), ("k", (32, 32)), ("v", (32, 32)), ("o", (32, 64))):
                weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (
                    rng.standard_normal(shape).astype(np.float32) / 6
                )

    settings = {"head_dim": 32, "num_key_value_heads": 1}
    assert agrees_with_numpy(edited(tiny, tmp_path / "wide", lambda c: c.update(settings), reshape))


def test_a_tied_head_is_the_embedding(tiny: Path, tmp_path: Path):
    assert agrees_with_numpy(
        edited(
            tiny,
            tmp_path / "tied",
            lambda c: c.update(tie_word_embeddings=True),
            lambda w: w.pop("lm_head.weight"),
        )
    )


def test_a_model_in_half_precision_is_loaded_in_single(tiny: Path, tmp_path: Path):
    def halve(weights: dict[str, np.ndarray]) -> None:
        weights.update({name: t.astype(ml_dtypes.bfloat16) for name, t in weights.items()})

    half = edited(tiny, tmp_path / "half", lambda c: c.update(torch_dtype="bfloat16"), halve)
    single = edited(
        half,
        tmp_path / "single",
        lambda c: None,
        lambda w: w.update({name: t.astype(np.float32) for name, t in w.items()}),
    )
    (first, _), (second, _) = (
        predict(directory, example([[Segment(THREE, 1)]], ROW)) for directory in (half, single)
    )
    np.testing.assert_array_equal(first, second)


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def without_a_layer(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name: t for name, t in weights.items() if "layers.1." not in name},
        directory / "model.safetensors",
    )


def setting(**values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "does not exist; give model.path a Hugging Face directory"),
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda d: (d / "tokenizer_config.json").unlink(), "has no tokenizer_config.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "its tokenizer cannot be loaded"),
        (lambda d: (d / "model.safetensors").unlink(), r"has no \*.safetensors file"),
        (truncated, "model.safetensors is not whole, or no safetensors file"),
        (
            without_a_layer,
            "its weights have no tensor model.layers.1.input_layernorm.weight, which",
        ),
        (
            setting(hidden_size=64, head_dim=16),
            "lm_head.weight in .* has the shape .16, 32., and by",
        ),
        (setting(hidden_act="relu6"), "its weights cannot be loaded .*relu6"),
        (setting(model_type="gpt2"), "model type 'gpt2' is not supported"),
        (setting(attention_bias=True), "attention_bias is true and is not supported"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json is not a map of settings"),
        (lambda d: (d / "config.json").write_bytes(b"\xff"), "config.json cannot be read"),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json cannot be read"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    tiny: Path, tmp_path: Path, spoil: Callable[[Path], None], says: str
):
    directory = tmp_path / "model"
    shutil.copytree(tiny, directory)
    spoil(directory)
    with pytest.raises(ModelError, match=f"^model directory {directory}:? .*{says}") as caught:
        model.load(directory, CONTEXT)
    assert "\n" not in str(caught.value)
