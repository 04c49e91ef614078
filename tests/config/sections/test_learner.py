from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from streamrl.config import run_file
from streamrl.config.sections.learner import ImportanceWeights, Mesh

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


@pytest.mark.parametrize(
    "correction",
    [
        (
            "{old_policy: decoupled, weights: {by: sequence, beyond: mask}, reject: {distance:"
            " k1, by: sequence, above: 0.5}}"
        ),
        "{old_policy: bypass, reject: {distance: geometric, above: 1.5}}",
    ],
)
def test_corrections_are_separate_choices(correction: str):
    chosen = run_file.load(QUICKSTART, [f"learner.correction={correction}"]).learner.correction
    assert chosen.model_dump(exclude_unset=True) == yaml.safe_load(correction)


def test_a_loss_without_a_ratio_takes_weights_of_the_policy_that_sampled():
    run = run_file.load(QUICKSTART, ["learner.loss=grpo", "learner.correction.weights.by=token"])
    assert run.learner.correction.old_policy == "bypass"
    assert run.learner.correction.weights == ImportanceWeights(by="token")


@pytest.mark.parametrize(
    ("override", "uses_reference", "needs_scores"),
    [
        ("learner.kl=null", False, False),
        ("learner.kl.reference.by=learner", True, False),
        ("learner.kl.reference={by: pool, every: 20}", True, True),
        ("learner.teacher=m", True, True),
    ],
)
def test_who_asks_the_reference(override: str, uses_reference: bool, needs_scores: bool):
    learner = run_file.load(QUICKSTART, [override]).learner
    assert (learner.reference is not None, learner.needs_scores) == (
        uses_reference,
        needs_scores,
    )


def test_a_mesh_has_a_size():
    with pytest.raises(ValidationError, match="0 devices divide nothing; -1 takes all"):
        Mesh(data=0)


def test_a_model_somewhere_else_says_its_hidden_size_itself():
    assert run_file.load(QUICKSTART).model.hidden_size == 128
    assert (
        run_file.load(
            QUICKSTART, ["model.path=elsewhere", "model.hidden=4096", "batcher.balance=flops"]
        ).model.hidden_size
        == 4096
    )
