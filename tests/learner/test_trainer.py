"""What a trainer loads and asks, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.batcher.assemble import assemble
from streamrl.config.run_file import RunFile, parse
from streamrl.learner import trainer
from streamrl.learner.files import checkpoints
from streamrl.learner.inputs import TrainingInput
from streamrl.learner.model import model
from streamrl.learner.update import Updater
from tests.support.build import group


def run_of(directory: Path, tiny: Path, **learner: Any) -> RunFile:
    return parse(
        {
            "run": "small",
            "runs_dir": str(directory),
            "envs": {"copy": {}},
            "batcher": {"total_token_budget": 24, "max_seq_len": 16, "row_count": 2},
            "model": {"path": str(tiny), "max_seq_len": 16},
            "learner": learner,
        }
    )


@pytest.mark.parametrize(("learner", "loads"), [({}, 1), ({"kl": {}}, 2)], ids=["without", "with"])
def test_without_a_coefficient_no_reference_is_loaded_or_asked(
    learner: dict[str, Any], loads: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The default where `model.path` is given. The model of the policy is the only one that is
    loaded, and no pass is made for logprobs.
    """
    loaded = list[Path]()
    passes = list[object]()

    def load(directory: Path, *settings: Any, **others: Any) -> Any:
        loaded.append(directory)
        return load_model(directory, *settings, **others)

    def scores(updater: Updater, asked: Any, example: Any) -> np.ndarray:
        passes.append(asked)
        return np.zeros(example.input_ids.shape, np.float32)

    def train_step(self: Any, state: Any, inputs: Any) -> Any:
        raise InterruptedError("far enough")

    load_model = model.load
    monkeypatch.setattr(model, "load", load)
    monkeypatch.setattr(Updater, "scores", scores)
    monkeypatch.setattr("levanter.trainer.Trainer.train_step", train_step)
    batch = assemble(
        [group("copy", "g", sizes=(2, 3, 1), prompt=2)], 0, 0, row_count=2, max_seq_len=16
    )
    assert batch is not None
    with trainer.open_trainer(run_of(tmp_path, tiny, **learner)) as policy:
        with pytest.raises(InterruptedError):
            policy.step(TrainingInput(batch, 1))
        assert (policy.reference is None) == (loads == 1)
    assert len(loaded) == loads and len(passes) == loads - 1


def test_weights_that_are_read_at_once_have_a_directory_each_which_a_start_removes(
    tmp_path: Path, tiny: Path
):
    """Rank zero may still delete the one before while the others write the next."""
    run = run_of(tmp_path, tiny)
    directory = trainer.checkpoint_directory(run, "lead")
    with trainer.open_trainer(run, None, directory) as policy:
        with policy._exported() as first, policy._exported() as second:
            assert first != second and {first.parent, second.parent} == {directory}
        assert not list(directory.iterdir())
        with policy._exported() as left:
            copy = left.with_name(f"{left.name}-of-one-that-was-killed")
            left.rename(copy)
    checkpoints.remove_leftovers(directory, 0)
    assert not list(directory.iterdir())
