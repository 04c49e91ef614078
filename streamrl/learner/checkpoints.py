"""The learner's state on disk, with the place in `batches` it belongs to: parameters, optimiser, step and random key, and `position.json`.

A checkpoint appears by a rename, so there is never half of one. Weights that others pull are not here but in the store.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import levanter.checkpoint
from levanter.trainer_state import TrainerState

from streamrl.errors import ModelError

POSITION = "position.json"
TEMPORARY = ".tmp"


class Position(NamedTuple):
    """Where training stands."""

    version: int  # of the policy that the state is
    offset: int  # next record of `batches`
    sha256: str  # of the weights that were announced as this version


def save(directory: Path, state: TrainerState[Any], position: Position, keep: int) -> None:
    """Write a checkpoint into `directory`, a learner's own, and delete all but the newest `keep`."""
    temporary, final = directory / TEMPORARY, directory / f"{position.version:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    levanter.checkpoint.save_checkpoint(state.saveable_state, position.version, temporary, is_temporary=False)
    (temporary / POSITION).write_text(json.dumps(position._asdict()))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in versions(directory)[:-keep]:
        shutil.rmtree(directory / f"{old:06d}")


def versions(directory: Path) -> list[int]:
    """Those there are, oldest first."""
    return sorted(int(path.name) for path in directory.glob("[0-9]*") if (path / POSITION).is_file()) if directory.is_dir() else []


def latest(directory: Path, announced: int) -> Position | None:
    """The newest checkpoint of a version that is announced; one of a later version belongs to a log that is gone."""
    usable = [version for version in versions(directory) if version <= announced]
    return Position(**json.loads((directory / f"{usable[-1]:06d}" / POSITION).read_text())) if usable else None


def load(directory: Path, position: Position, state: TrainerState[Any]) -> TrainerState[Any]:
    """The state of a checkpoint; `state` is any of the same shape. To be called inside the trainer's mesh. Raises ModelError."""
    path = directory / f"{position.version:06d}"
    try:
        return eqx.combine(levanter.checkpoint.load_checkpoint(state.saveable_state, path), state)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"checkpoint {path} cannot be loaded ({' '.join(str(error).split())[:200]}); delete it to go on from the one before") from None
