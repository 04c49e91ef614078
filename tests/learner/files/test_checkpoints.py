from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import levanter.checkpoint
import numpy as np
import pytest

from streamrl.config.sections.learner import Learner
from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoints import POSITION, TrainingPosition
from streamrl.learner.model import model
from streamrl.learner.update import Updater
from streamrl.system.errors import CheckpointError
from tests.learner.conftest import CONTEXT
from tests.learner.test_update import ROWS, batch
from tests.learner.updaters import shared_updater


@pytest.fixture
def updater() -> Iterator[Updater]:
    made = shared_updater(Learner(kl=None), ROWS, CONTEXT)
    with made.training():
        yield made


@pytest.fixture
def state(updater: Updater, tiny: Path) -> Any:
    return updater.initial_state(model.load(tiny, CONTEXT))


def bits(state: Any) -> list[bytes]:
    """Parameters, optimiser, step and random key."""
    return [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
    ]


def write(directory: Path, *versions: int) -> None:
    """Checkpoints with nothing but their position."""
    for version in versions:
        checkpoints.path_of(directory, version).mkdir(parents=True)
        (checkpoints.path_of(directory, version) / POSITION).write_text(
            f'{{"version": {version}, "offset": {10 * version}, "sha256": "s{version}"}}'
        )


def test_training_goes_on_from_a_checkpoint_bit_by_bit(
    updater: Updater, state: Any, tiny: Path, tmp_path: Path
):
    for advantage in (1.0, -0.5):
        state, _ = updater.step(state, None, batch(advantage))
    checkpoints.save(tmp_path, state, TrainingPosition(2, 7, "abc"), keep=2)
    saved = bits(state)
    state, _ = updater.step(state, None, batch(0.3))

    found = checkpoints.latest(tmp_path, 2)
    assert found == TrainingPosition(2, 7, "abc")
    again = checkpoints.load(tmp_path, found, updater.initial_state(model.load(tiny, CONTEXT)))
    assert bits(again) == saved and int(again.step) == 2
    again, _ = updater.step(again, None, batch(0.3))
    assert bits(again) == bits(state)


def test_the_newest_that_is_announced_is_taken(tmp_path: Path):
    assert checkpoints.latest(tmp_path / "none", 5) is None
    write(tmp_path, 0, 20, 40)
    assert checkpoints.latest(tmp_path, 59) == TrainingPosition(40, 400, "s40")
    assert checkpoints.latest(tmp_path, 39) == TrainingPosition(20, 200, "s20")
    assert checkpoints.latest(tmp_path, -1) is None


def test_half_a_checkpoint_is_none(tmp_path: Path):
    write(tmp_path, 0, 20)
    (tmp_path / "000020" / POSITION).unlink()
    (tmp_path / ".tmp-000020").mkdir()
    (tmp_path / "0abc").mkdir()
    (tmp_path / "0abc" / POSITION).write_text("of somebody else")
    assert checkpoints.versions(tmp_path) == [0]


def test_what_an_interrupted_one_left_goes(state: Any, tmp_path: Path):
    (tmp_path / ".tmp-000020-ab" / "part").mkdir(parents=True)
    checkpoints.save(tmp_path, state, TrainingPosition(40, 0, ""), keep=2)
    # another process may be writing it, for all that this one knows
    assert (tmp_path / ".tmp-000020-ab").is_dir()
    checkpoints.remove_leftovers(tmp_path, announced=40)
    assert [path.name for path in tmp_path.iterdir()] == ["000040"]


def test_what_an_interrupted_deletion_left_goes(state: Any, tmp_path: Path):
    """Its position was deleted first, so it is no checkpoint, and its other files are the largest
    ones of a run. A directory of another name stays.
    """
    (tmp_path / "000023" / "state").mkdir(parents=True)
    (tmp_path / "start").mkdir()
    checkpoints.save(tmp_path, state, TrainingPosition(40, 0, ""), keep=2)
    checkpoints.remove_leftovers(tmp_path, announced=40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000040", "start"]


def test_a_crash_before_one_is_whole_leaves_the_one_before(state: Any, tmp_path: Path):
    checkpoints.save(tmp_path, state, TrainingPosition(1, 1, "one"), keep=1)
    checkpoints.begin(tmp_path, state, 2).wait()
    assert checkpoints.latest(tmp_path, 2) == TrainingPosition(1, 1, "one")
    checkpoints.remove_leftovers(tmp_path, announced=2)
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]
    with pytest.raises(CheckpointError, match="000002 cannot be written"):
        checkpoints.complete(tmp_path, TrainingPosition(2, 2, "two"), keep=1)
    assert checkpoints.versions(tmp_path) == [1]


def test_what_is_saved_is_the_state_before_the_next_step(
    updater: Updater, state: Any, tiny: Path, tmp_path: Path
):
    """The step gives its memory away while the files are being written."""
    state, _ = updater.step(state, None, batch(1.0))
    saved = bits(state)
    pending = checkpoints.begin(tmp_path, state, 1)
    state, _ = updater.step(state, None, batch(-0.5))
    assert bits(state) != saved
    pending.wait()
    checkpoints.complete(tmp_path, TrainingPosition(1, 1, "one"), keep=1)
    again = checkpoints.load(
        tmp_path, TrainingPosition(1, 1, "one"), updater.initial_state(model.load(tiny, CONTEXT))
    )
    assert bits(again) == saved


def test_nothing_of_the_state_stays_in_memory_when_it_is_written(state: Any, tmp_path: Path):
    before = len(jax.live_arrays())
    checkpoints.save(tmp_path, state, TrainingPosition(1, 1, "sha"), keep=1)
    assert len(jax.live_arrays()) == before


def test_all_arrays_are_committed_together(state: Any, tmp_path: Path):
    """Committed one by one, each would write the directory of all that are there already."""
    checkpoints.save(tmp_path, state, TrainingPosition(1, 1, "sha"), keep=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    assert len(files) < len(arrays)


def test_no_two_are_written_under_one_path(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """TensorStore keeps what it read of a path for the life of the process: the next checkpoint
    there finds files that are gone.
    """
    paths = list[str]()
    save = levanter.checkpoint.save_checkpoint

    def noted(tree: Any, step: int, path: str, **options: Any) -> None:
        paths.append(path)
        save(tree, step, path, **options)

    monkeypatch.setattr(levanter.checkpoint, "save_checkpoint", noted)
    for version in range(12):
        checkpoints.save(tmp_path, state, TrainingPosition(version, 0, ""), keep=2)
    assert len(set(paths)) == 12 and checkpoints.versions(tmp_path) == [10, 11]


def test_as_many_are_kept_as_asked_for(state: Any, tmp_path: Path):
    for version in (0, 20, 40):
        checkpoints.save(tmp_path, state, TrainingPosition(version, 0, ""), keep=2)
    assert checkpoints.versions(tmp_path) == [20, 40] and not (tmp_path / "000000").exists()


def test_those_of_a_log_that_is_gone_do_not_push_out_the_new_ones(state: Any, tmp_path: Path):
    write(tmp_path, 60, 80)
    checkpoints.remove_leftovers(tmp_path, announced=20)
    checkpoints.save(tmp_path, state, TrainingPosition(20, 0, ""), keep=2)
    assert checkpoints.versions(tmp_path) == [20]


def test_one_that_is_completed_late_leaves_those_of_a_successor_alone(state: Any, tmp_path: Path):
    checkpoints.begin(tmp_path, state, 20).wait()
    write(tmp_path, 0, 40, 60)  # another process has gone on meanwhile
    checkpoints.complete(tmp_path, TrainingPosition(20, 0, ""), keep=1)
    assert checkpoints.versions(tmp_path) == [20, 40, 60]


def test_a_checkpoint_that_cannot_be_read_is_said(state: Any, tmp_path: Path):
    checkpoints.save(tmp_path, state, TrainingPosition(20, 0, ""), keep=2)
    for path in (tmp_path / "000020").rglob("*"):
        if path.is_file() and path.name != POSITION:
            path.unlink()
    with pytest.raises(
        CheckpointError,
        match=f"checkpoint {tmp_path}/000020 cannot be loaded .*delete {tmp_path}/000020 to cont",
    ):
        checkpoints.load(tmp_path, TrainingPosition(20, 0, ""), state)
    (tmp_path / "000020" / POSITION).write_text("{")
    with pytest.raises(
        CheckpointError, match=f"checkpoint {tmp_path}/000020: its position.json cannot be read"
    ):
        checkpoints.latest(tmp_path, 20)


def test_a_checkpoint_that_cannot_be_written_is_said(state: Any, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError,
        match=f"checkpoint {tmp_path}/file/000020 cannot be written .*free some space",
    ):
        checkpoints.save(tmp_path / "file", state, TrainingPosition(20, 0, ""), keep=2)
