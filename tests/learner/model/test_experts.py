"""A mixture of experts computes what Levanter's layers compute, wherever its tokens and experts
are, and along the experts that a server chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from msgspec import structs
from safetensors.numpy import load_file

from streamrl.batcher.assemble import assemble
from streamrl.learner.loss.losses import k3
from streamrl.learner.model import experts, model
from streamrl.learner.model.examples import RlExample
from streamrl.learner.model.experts import route, without_foreign_experts
from streamrl.learner.model.model import predict, with_axes
from streamrl.learner.parallel.mesh import use_mesh
from tests.learner import mixture
from tests.learner.devices import run_on_eight
from tests.learner.gradients import batch, gradient
from tests.learner.meshes import MIXTURE_MESHES
from tests.support.build import group


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with use_mesh():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with use_mesh():
        return mixture.write(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def policy(directory: Path) -> Any:
    with use_mesh():
        return model.load(directory, mixture.CONTEXT)


def chosen_by(policy: Any, example: RlExample) -> np.ndarray:
    """The experts that the router of Levanter's own layers chooses, counted from 1: (rows,
    max_seq_len, layers, k) uint8.
    """
    mask = AttentionMask.causal().with_segment_ids(with_axes(example.segment_ids))
    hidden = policy.embeddings.embed(with_axes(example.input_ids))
    found = list[jax.Array]()
    for layer in policy.transformer.layers.unstacked():
        positions = with_axes(example.position_ids)
        attended = layer.self_attn(layer.input_layernorm(hidden), mask, pos_ids=positions)
        logits = layer.mlp.gate(layer.post_attention_layernorm(hidden + attended))
        scores = logits.rearrange(("batch", "position", "experts")).array.astype(jnp.float32)
        found.append(jax.lax.top_k(scores, mixture.CHOSEN)[1])
        hidden = layer(hidden, mask, pos_ids=positions)
    return (np.stack(found, axis=2) + 1).astype(np.uint8)


def moved(chosen: np.ndarray) -> np.ndarray:
    """Each token's experts, and the next ones instead."""
    return (chosen % mixture.EXPERTS + 1).astype(np.uint8)


@eqx.filter_jit
def value_and_gradient(policy: Any, example: RlExample) -> tuple[jax.Array, Any]:
    """The sum of the sampled tokens' logprobs."""

    def summed(policy: Any) -> jax.Array:
        return jnp.sum(predict(policy, example).logprobs * example.loss_mask)

    return eqx.filter_value_and_grad(summed)(policy)


def worst(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def test_the_layers_are_levanters_in_value_and_gradient(policy: Any):
    example = batch()
    tokens = with_axes(example.input_ids)
    positions = with_axes(example.position_ids)
    mask = AttentionMask.causal().with_segment_ids(with_axes(example.segment_ids))

    def summed(policy: Any, ours: bool) -> jax.Array:
        states = (
            experts.activations(policy, tokens, mask, positions)
            if ours
            else policy.activations(tokens, mask, pos_ids=positions)
        )
        return hax.sum(states * states).scalar()

    found = eqx.filter_jit(eqx.filter_value_and_grad(summed))
    assert worst(found(policy, True), found(policy, False)) < 2e-3
    value = float(found(policy, False)[0])
    assert value > 100, "gradients are as large"


def test_own_choice_replayed_is_the_plain_forward_pass_and_another_one_is_not(policy: Any):
    example = batch()
    own = chosen_by(policy, example)
    plain = value_and_gradient(policy, example)
    replayed = value_and_gradient(policy, example._replace(routed_experts=own))
    assert worst(plain, replayed) < 1e-4
    unknown = value_and_gradient(policy, example._replace(routed_experts=np.zeros_like(own)))
    assert worst(plain, unknown) < 1e-4
    other = value_and_gradient(policy, example._replace(routed_experts=moved(own)))
    assert abs(float(other[0] - plain[0])) > 0.1
    router = other[1].transformer.layers.stacked.mlp.gate.weight.array
    assert float(jnp.abs(router).max()) > 1e-3, "the router is trained along the given experts"


def test_given_experts_have_the_weights_of_the_routers_softmax(policy: Any):
    """The router gives three of six experts 1/4, 1/4 + 1/8 and 1/8."""
    logits = jnp.log(jnp.array([[2.0, 3, 1, 1, 0.5, 0.5]] * 3))
    given = jnp.array([[3, 1], [0, 0], [2, 0]], jnp.uint8)
    weights, chosen = route(logits, given, policy.config)
    assert chosen.tolist() == [[2, 0], [1, 0], [1, 0]], "0: the router decides"
    np.testing.assert_allclose(weights, [[1 / 3, 2 / 3], [0.6, 0.4], [0.6, 0.4]], rtol=1e-6)


def test_the_mismatch_with_a_server_is_smaller_with_its_routing(policy: Any):
    """The server keeps its router in eight bits."""
    example = batch()
    where: Any = lambda policy: policy.transformer.layers.stacked.mlp.gate.weight.array  # noqa: E731
    rounded = where(policy).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    server = eqx.tree_at(where, policy, rounded)
    routing = chosen_by(server, example)
    sent = example._replace(routed_experts=routing)
    said = np.asarray(eqx.filter_jit(predict)(server, sent).logprobs)
    own = chosen_by(policy, example)
    elsewhere = (np.sort(routing) != np.sort(own)).any(-1)[example.segment_ids > 0].mean()
    assert elsewhere > 0, "a case in which no token is sent elsewhere shows nothing"

    def mismatch(taken: RlExample) -> float:
        current = eqx.filter_jit(predict)(policy, taken).logprobs
        return float((k3(said, current) * example.loss_mask).sum() / example.loss_mask.sum())

    without = mismatch(example)
    with_replay = mismatch(sent)
    print(f"{elsewhere:.1%} sent elsewhere; mismatch {without:.2e}, replayed {with_replay:.2e}")
    assert with_replay < without / 2


def test_experts_that_the_model_cannot_have_chosen_are_left_out(
    policy: Any, caplog: pytest.LogCaptureFixture
):
    made = assemble([group(sizes=(3, 3))], 0, 0, row_count=1, max_seq_len=10)
    assert made is not None
    experts = np.ones((6, mixture.LAYERS, mixture.CHOSEN), np.uint8)
    prompt = experts[:2]
    whole = structs.replace(made, routed_experts=experts, prompt_routed_experts=prompt)
    assert (
        without_foreign_experts(whole, policy) is whole
        and without_foreign_experts(made, policy) is made
    )
    assert caplog.text == ""
    unknown = np.uint8(mixture.EXPERTS)
    for others, of_prompt in (
        (experts[:, :1], prompt[:, :1]),
        (experts[..., :1], prompt[..., :1]),
        (experts + unknown, prompt),
        (experts, prompt + unknown),
    ):
        wrong = structs.replace(whole, routed_experts=others, prompt_routed_experts=of_prompt)
        found = without_foreign_experts(wrong, policy)
        assert found.routed_experts is None and found.prompt_routed_experts is None
    assert caplog.text.count("its own router decides") == 4
    assert "experts of 1 layers, 2 a token, which are not those of this model" in caplog.text


@pytest.mark.slow
def test_every_mesh_gives_the_gradient_of_one_device(directory: Path, tmp_path: Path):
    """Rows, the inner width and the experts divided among eight devices."""
    run_on_eight("tests.learner.meshes", directory, tmp_path / "found", "mixture")
    found = load_file(tmp_path / "found")
    expected = gradient(directory)
    for mesh in MIXTURE_MESHES:
        distance = max(
            float(np.abs(found[f"{mesh}/{name}"] - array).max()) for name, array in expected.items()
        )
        print(f"{mesh}: at most {distance:.1e} from one device")
        assert distance <= 1e-5, mesh
