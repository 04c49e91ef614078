from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from levanter.adaptor.lora import merge_lora_modules
from safetensors.numpy import load_file

from streamrl.config.sections.learner import Lora
from streamrl.learner import adapters
from streamrl.learner.adapters import AdapterFormat
from streamrl.learner.files import export
from streamrl.learner.model import model
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system.errors import ModelError
from streamrl.weights.manifest import Manifest
from tests.learner import mixture, plain_llama
from tests.learner.conftest import CONTEXT
from tests.learner.test_update import GOOD, an_updater, batch

SETTINGS = Lora(rank=4, alpha=8)
FORM = AdapterFormat(SETTINGS, Manifest(()))
SCALE = 2.0
LAYERS = {
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
}


@pytest.fixture(scope="module")
def _mesh() -> Iterator[None]:
    with use_mesh():
        yield


@pytest.fixture(scope="module")
def adapted(tiny: Path, _mesh: None) -> Any:
    """The tiny model with adapters that change it visibly."""
    base = model.load(tiny, CONTEXT)
    return adapters.randomized(adapters.attach(base, SETTINGS, seed=3), seed=4, scale=0.3)


def next_logprobs(made: Any) -> np.ndarray:
    example = model.single_sequence(np.array(GOOD))
    return np.asarray(model.predict(made, example).logprobs)[0, :-1]


def test_new_adapters_change_nothing(tiny: Path, _mesh: None):
    base = model.load(tiny, CONTEXT)
    adapted = adapters.attach(base, SETTINGS, seed=3)
    np.testing.assert_array_equal(next_logprobs(adapted), next_logprobs(base))
    tensors = adapters.state_dict(adapted)
    for layer in LAYERS:
        assert tensors[f"base_model.model.{layer}.lora_A.weight"].std() > 0.01
        assert not tensors[f"base_model.model.{layer}.lora_B.weight"].any()
    assert len(tensors) == 2 * len(LAYERS)


def test_the_merged_model_computes_what_the_adapters_do(tiny: Path, adapted: Any, tmp_path: Path):
    """Levanter's model with adapters, numpy's with W + scale B A, and Levanter's own merge."""
    tensors = adapters.merged(load_file(tiny / export.WEIGHTS), adapters.state_dict(adapted), SCALE)
    export.save(tensors, tiny, tmp_path)
    by_numpy = plain_llama.next_logprobs(tmp_path, GOOD)
    assert np.abs(by_numpy - plain_llama.next_logprobs(tiny, GOOD)).max() > 0.05
    np.testing.assert_allclose(next_logprobs(adapted), by_numpy, atol=2e-5)
    for name, tensor in export.state_dict(merge_lora_modules(adapted)).items():
        np.testing.assert_allclose(tensors[name], tensor, atol=1e-6, err_msg=name)


def test_the_base_is_still_there(tiny: Path, adapted: Any):
    found = export.state_dict(adapters.detach(adapted))
    for name, tensor in load_file(tiny / export.WEIGHTS).items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_an_adapter_is_written_in_the_layout_of_peft(adapted: Any, tmp_path: Path):
    adapters.save(adapters.state_dict(adapted), FORM, tmp_path / "one")
    adapters.save(adapters.state_dict(adapted), FORM, tmp_path / "two")
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two and set(one) == {"adapter_model.safetensors", "adapter_config.json"}
    config = json.loads(one["adapter_config.json"])
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert config["base_model_name_or_path"] == f"sha256:{Manifest(()).sha256}"
    shapes = {
        name: tensor.shape
        for name, tensor in load_file(tmp_path / "one" / "adapter_model.safetensors").items()
    }
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == (4, 64)
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] == (32, 4)
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] == (32, 4)


def test_only_the_layers_that_are_named_have_adapters(tiny: Path, _mesh: None):
    chosen = Lora(rank=2, alpha=2, targets=["q_proj", "down_proj"])
    tensors = adapters.state_dict(adapters.attach(model.load(tiny, CONTEXT), chosen, seed=0))
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "down_proj"}


def test_a_step_trains_adapters_alone(tiny: Path):
    updater = an_updater(kl=None, learning_rate=1e-2)
    with updater.training():
        base = model.load(tiny, CONTEXT)
        state = updater.initial_state(adapters.attach(base, SETTINGS, seed=3))
        before = adapters.state_dict(state.model)
        sizes = [leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        assert sum(sizes) == 2 * sum(tensor.size for tensor in before.values())
        losses = list[float]()
        for _ in range(3):
            state, measured = updater.step(state, None, batch())
            losses.append(measured["loss"])
        after = adapters.state_dict(state.model)
        kept = export.state_dict(adapters.detach(state.model))
    assert losses[2] < losses[0]
    assert all((after[name] != tensor).any() for name, tensor in before.items())
    for name, tensor in load_file(tiny / export.WEIGHTS).items():
        np.testing.assert_array_equal(kept[name], tensor, err_msg=name)


ATTENTION = Lora(rank=4, alpha=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"])


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory, _mesh: None) -> Path:
    """A mixture of experts of two layers; not to be written to."""
    directory = tmp_path_factory.mktemp("mixture")
    return mixture.write(directory)


def test_a_mixture_of_experts_has_adapters_of_its_attention(
    experts_dir: Path, _mesh: None, tmp_path: Path
):
    base = model.load(experts_dir, CONTEXT)
    adapted = adapters.randomized(adapters.attach(base, ATTENTION, seed=3), seed=4, scale=0.3)
    tensors = adapters.state_dict(adapted)
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    assert layers == {
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(mixture.LAYERS)
        for name in ATTENTION.targets
    }
    merged = adapters.merged(load_file(experts_dir / export.WEIGHTS), tensors, SCALE)
    export.save(merged, experts_dir, tmp_path / "merged")
    by_adapters = next_logprobs(adapted)
    by_weights = next_logprobs(model.load(tmp_path / "merged", CONTEXT))
    assert np.abs(by_adapters - next_logprobs(base)).max() > 0.05
    np.testing.assert_allclose(by_adapters, by_weights, atol=2e-5)


def test_a_step_on_a_mixture_of_experts_trains_adapters_alone(experts_dir: Path):
    updater = an_updater(kl=None, learning_rate=1e-2)
    with updater.training():
        base = model.load(experts_dir, CONTEXT)
        state = updater.initial_state(adapters.attach(base, ATTENTION, seed=3))
        before = adapters.state_dict(state.model)
        losses = list[float]()
        for _ in range(3):
            state, measured = updater.step(state, None, batch())
            losses.append(measured["loss"])
        after = adapters.state_dict(state.model)
        kept = export.state_dict(adapters.detach(state.model))
        published = adapters.local_weights(state.model)
    assert losses[2] < losses[0]
    assert all((after[name] != tensor).any() for name, tensor in before.items())
    assert [*published.files.values()] == [sorted(after)]
    for name, tensor in load_file(experts_dir / export.WEIGHTS).items():
        np.testing.assert_array_equal(kept[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (Lora().targets, "gate_proj, up_proj, down_proj"),
        (["q_proj", "down_proj"], "down_proj"),
    ],
)
def test_experts_have_no_adapters(targets: list[Any], named: str, experts_dir: Path, _mesh: None):
    base = model.load(experts_dir, CONTEXT)
    with pytest.raises(
        ModelError,
        match=(
            rf"^learner\.lora\.targets has {named}, which are the experts of a mixture, and experts"
            r" have no adapters; give \[q_proj, k_proj, v_proj, o_proj\] or fewer$"
        ),
    ):
        adapters.attach(base, Lora(rank=4, alpha=8, targets=targets), seed=0)
