from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax import monitoring
from safetensors.numpy import load_file

from streamrl.config.sections.learner import Kl, Learner
from streamrl.learner.files import export
from streamrl.learner.model import model
from streamrl.learner.model.examples import RlExample
from streamrl.learner.update import Updater, device_row_order, normalize_advantages, reorder_rows
from streamrl.system.errors import ConfigError
from tests.learner import plain_llama
from tests.learner.conftest import CONTEXT
from tests.learner.examples import Segment, example

ROWS = 2
ROW = 32
# answers to "47="
GOOD = [1, 8, 11, 15, 8, 11, 2]
BAD = [1, 8, 11, 15, 9, 9, 9]
# logprobs of an older policy: ratios on both sides of the clip range
LITTLE_KNOWN = (-3.5, -2.0, -2.7)
COMPILED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _count_compilations() -> None:
    monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: COMPILED.append(event) if "backend_compile" in event else None
    )


def batch(advantage: float = 1.0, temperature: float = 1.0) -> RlExample:
    good = Segment(GOOD, 4, advantage, LITTLE_KNOWN, temperature)
    bad = Segment(BAD, 4, -advantage, LITTLE_KNOWN)
    return example([[good, bad, good], [bad, Segment(GOOD, 5, 3 * advantage, (-2.8, -2.6))]], ROW)


def an_updater(**settings: Any) -> Updater:
    return Updater(Learner.model_validate({"warmup_steps": 0, **settings}), ROWS, ROW)


class Training:
    """An updater with a state, inside its mesh. `updater`: one that has compiled its step."""

    def __init__(self, tiny: Path, updater: Updater | None = None, **settings: Any) -> None:
        self.updater = updater or an_updater(**settings)
        self.config = self.updater.config
        self._tiny = tiny

    def __enter__(self) -> Training:
        self._mesh = self.updater.training()
        self._mesh.__enter__()
        self.reference = model.load(self._tiny, CONTEXT)
        self.state = self.updater.initial_state(model.load(self._tiny, CONTEXT))
        return self

    def __exit__(self, *error: Any) -> None:
        self._mesh.__exit__(*error)

    def step(self, taken: RlExample) -> dict[str, float]:
        self.state, measured = self.updater.step(self.state, self.reference, taken)
        return measured


@pytest.fixture(scope="module")
def updater() -> Updater:
    return an_updater(kl=Kl(coefficient=0.1))


@pytest.fixture
def training(tiny: Path, updater: Updater) -> Iterator[Training]:
    with Training(tiny, updater) as made:
        yield made


def by_hand(directory: Path, config: Learner) -> dict[str, float]:
    """The metrics of a step on `batch(temperature=0.7)`, token by token, in plain numpy, where the
    policy is the reference still.
    """
    good, warm, bad = (
        plain_llama.next_logprobs(directory, t, x)[3:]
        for t, x in ((GOOD, 1.0), (GOOD, 0.7), (BAD, 1.0))
    )
    current = np.concatenate([warm, bad, warm, bad, good[1:]])
    policy = np.array([*LITTLE_KNOWN] * 4 + [-2.8, -2.6])
    advantages = np.repeat([1.0, -1.0, 1.0, -1.0, 3.0], [3, 3, 3, 3, 2])
    advantages /= advantages.std()
    ratio = np.exp(current - policy)
    clipped = np.clip(ratio, 0.8, 1.2)
    loss = (
        -np.minimum(ratio * advantages, clipped * advantages).mean()
        if config.loss == "ppo"
        else -(clipped * advantages).mean()
    )
    entropy = [
        plain_llama.entropies(directory, t, x)[s:-1]
        for t, x, s in ((GOOD, 0.7, 3), (BAD, 1, 3), (GOOD, 0.7, 3), (BAD, 1, 3), (GOOD, 1, 4))
    ]
    return {
        "loss": loss,
        "policy_loss": loss,
        "kl": 0.0,
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_fraction": (np.abs(ratio - 1) > 0.2).mean(),
        "entropy": np.concatenate(entropy).mean(),
    }


@pytest.mark.parametrize("loss", ["ppo", "clipped-ratio"])
def test_a_step_measures_what_numpy_does(tiny: Path, loss: str):
    with Training(tiny, loss=loss, kl=Kl(coefficient=0.1)) as training:
        measured = training.step(batch(temperature=0.7))
    expected = by_hand(tiny, training.config)
    assert 0 < expected["clip_fraction"] < 1
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=2e-5)
    assert (
        measured["grad_norm"] > 0
        and measured["step_s"] > 0
        and measured["tokens_per_s"] == pytest.approx(35 / measured["step_s"])
    )


def test_a_step_goes_down_the_slope_of_the_loss(tiny: Path, tmp_path: Path):
    """By the first step Adam moves every weight by the learning rate, against its gradient: numpy
    finds a lower loss in what is exported then.
    """
    with Training(tiny, kl=Kl(coefficient=0.1), learning_rate=1e-4) as training:
        first = training.step(batch(temperature=0.7))
        export.save(export.state_dict(training.state.model), tiny, tmp_path)
    before = load_file(tiny / export.WEIGHTS)
    after = load_file(tmp_path / export.WEIGHTS)
    assert max(float(np.abs(after[name] - before[name]).max()) for name in before) == pytest.approx(
        1e-4, rel=1e-2
    )
    fallen = first["loss"] - by_hand(tmp_path, training.config)["loss"]
    assert fallen > 0


def test_the_divergence_is_from_the_reference(training: Training):
    """After some steps the policy has left it; k3 of plain logprobs says how far."""
    for _ in range(3):
        training.step(batch())
    taken = batch()
    current, reference = (
        training.updater.logprobs(m, taken) for m in (training.state.model, training.reference)
    )
    d = (reference - current)[taken.loss_mask > 0]
    measured = training.step(taken)
    assert (
        measured["kl"] == pytest.approx(float((np.exp(d) - d - 1).mean()), rel=1e-3)
        and measured["kl"] > 1e-6
    )
    assert measured["loss"] == pytest.approx(
        measured["policy_loss"] + 0.1 * measured["kl"], abs=1e-6
    )


def test_nothing_is_compiled_after_the_first_step(training: Training):
    training.updater.logprobs(training.state.model, model.single_sequence(np.arange(8)))
    training.step(batch())
    assert COMPILED
    seen = len(COMPILED)
    for advantage in (0.5, -1.0, 0.0, 2.0):
        training.step(batch(advantage, temperature=1 + advantage / 10))
        training.updater.logprobs(training.state.model, model.single_sequence(np.arange(8)))
    assert COMPILED[seen:] == []


def test_good_answers_become_likelier(training: Training):
    def likelihood() -> float:
        return float(
            training.updater.logprobs(training.state.model, model.single_sequence(np.array(GOOD)))[
                0, 3:6
            ].sum()
        )

    before = likelihood()
    for _ in range(20):
        training.step(batch())
    assert likelihood() > before + 0.3


def test_without_a_coefficient_nobody_asks_the_reference(tiny: Path):
    with Training(tiny, kl=None) as training:
        training.reference = None
        assert "kl" not in training.step(batch())


def test_the_same_steps_give_the_same_bits(tiny: Path):
    ends: list[list[bytes]] = []
    for _ in range(2):
        with Training(tiny) as training:
            for advantage in (1.0, 0.3, -0.7):
                training.step(batch(advantage))
            ends.append(
                [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(training.state.model)]
            )
    assert ends[0] == ends[1]


def test_the_learning_rate_warms_up(tiny: Path):
    with Training(tiny, warmup_steps=4, learning_rate=0.4) as training:
        rates: list[float] = []
        for _ in range(2):
            before = np.asarray(training.state.model.lm_head.weight.array)
            training.step(batch())
            rates.append(
                float(np.abs(np.asarray(training.state.model.lm_head.weight.array) - before).max())
            )
    assert rates[0] == pytest.approx(0.1, rel=1e-2) and 0.1 < rates[1] <= 0.4


def bits(state: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_goes_on(training: Training):
    """Neither the parameters nor the optimiser; and the state that it hands back can be
    trained on.
    """
    training.step(batch())
    before = bits((training.state.model, training.state.opt_state[2]))
    spoilt = batch()
    spoilt.advantages[0, 3] = np.inf
    measured = training.step(spoilt)
    assert (
        measured["skipped"] == 1
        and all(map(math.isfinite, measured.values()))
        and "loss" not in measured
    )
    assert bits((training.state.model, training.state.opt_state[2])) == before
    assert (
        training.step(batch())["skipped"] == 0
        and bits(training.state.model) != before[: len(bits(training.state.model))]
    )


def test_a_logprob_that_no_softmax_gives_spoils_no_step(training: Training):
    """Its ratio is beyond what float32 holds."""
    for logprob, advantage in ((-200.0, -1.0), (-9999.0, 1.0)):
        spoilt = batch()
        spoilt.policy_logprobs[0, 3], spoilt.advantages[0, 3] = logprob, advantage
        measured = training.step(spoilt)
        assert measured["skipped"] == 0 and math.isfinite(measured["grad_norm"])


def test_a_batch_of_another_shape_is_trained_on_whole(tiny: Path):
    """It was made under earlier settings, or has rows of another length (batcher.row_lengths).
    Padding changes nothing: other shapes give the gradient that one row gives. Parameters would be
    no measure of that: Adam divides a gradient by its size, also one that is all rounding.
    """
    good = [Segment(GOOD, 4, 1.0, LITTLE_KNOWN)]
    found = list[list[np.ndarray]]()
    for rows, length in ((1, ROW), (3, ROW), (1, 2 * ROW)):
        with Training(tiny, kl=Kl(coefficient=0.1)) as training:
            measured = training.step(example([good, *([[]] * (rows - 1))], length))
            assert measured["grad_norm"] > 0.1
            first_moments = cast(Any, training.state.opt_state)[2][0].mu
            found.append([np.asarray(leaf) for leaf in jax.tree.leaves(first_moments)])
    for other in found[1:]:
        for one, padded in zip(found[0], other, strict=True):
            np.testing.assert_allclose(one, padded, rtol=0, atol=1e-6)


def test_a_loss_that_cannot_be_loaded_is_said_before_any_training():
    with pytest.raises(ConfigError, match="learner.loss: .*nowhere"):
        Updater(Learner(loss="nowhere:mine"), ROWS, ROW)
    with pytest.raises(ConfigError, match="learner.kl.estimator: .*nowhere"):
        Updater(Learner(kl=Kl(estimator="nowhere:mine")), ROWS, ROW)


def test_advantages_are_divided_by_their_deviation_over_sampled_tokens():
    """Tokens 1, 1, 1, -1: mean 0.5, standard deviation sqrt(0.75). Prompts and padding do not
    count.
    """
    made = example([[Segment([1, 2, 3, 4], 1, 1.0), Segment([1, 2], 1, -1.0)]], 8)
    scaled = normalize_advantages(made)
    assert scaled.advantages.dtype == np.float32
    np.testing.assert_allclose(scaled.advantages, made.advantages / np.sqrt(0.75), rtol=1e-6)


@pytest.mark.parametrize("advantage", [0.0, 0.5, 1e-9])
def test_equal_advantages_are_left_alone(advantage: float):
    made = example([[Segment([1, 2, 3], 1, advantage), Segment([1, 2], 1, advantage)]], 8)
    np.testing.assert_array_equal(normalize_advantages(made).advantages, made.advantages)
    np.testing.assert_array_equal(
        normalize_advantages(example([[]], 8)).advantages, np.zeros((1, 8))
    )


def test_each_device_has_a_stretch_of_the_batch():
    """Eight rows, two devices that take two rows at a time: rows 0 to 3 are the first one's, in
    both turns.
    """
    assert device_row_order(8, devices=2, micro_batches=2, of_device=2).tolist() == [
        0,
        1,
        4,
        5,
        2,
        3,
        6,
        7,
    ]
    # five rows: the first device has three of them, and both are filled up with padding
    assert device_row_order(5, devices=2, micro_batches=2, of_device=2).tolist() == [
        0,
        1,
        3,
        4,
        2,
        -1,
        -1,
        -1,
    ]
    # on one device rows stay where they are
    assert device_row_order(3, devices=1, micro_batches=2, of_device=2).tolist() == [
        0,
        1,
        2,
        -1,
    ] and device_row_order(3, 3, 1, 1).tolist() == [0, 1, 2]


def test_padding_stands_where_the_order_says():
    made = example([[Segment([5], 0)], [Segment([6], 0)]], 4)
    moved = reorder_rows(made, np.array([1, -1, 0]))
    assert (
        moved.input_ids[:, 0].tolist() == [6, 0, 5]
        and moved.segment_ids[1].tolist() == [0] * 4
        and moved.temperatures[1].tolist() == [1] * 4
    )
    assert reorder_rows(made, np.array([0, 1])) is made
