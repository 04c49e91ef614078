"""The learner's state on disk, with the place in `batches` it belongs to: parameters, optimiser,
step and random key, and `position.json`.

A checkpoint appears by a rename and goes by the removal of its position, so there is never half of
one. Weights that others pull are not here but in the store.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import levanter.checkpoint
from levanter.trainer_state import TrainerState

from streamrl.errors import CheckpointError, describe_error
from streamrl.learner.distributed import barrier, is_rank_zero, shared_token

# it warns of every part of the optimiser's state that has no values
logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)

POSITION = "position.json"
TEMPORARY = ".tmp-"


class TrainingPosition(NamedTuple):
    """Where training stands."""

    version: int  # of the policy that the state is
    offset: int  # next record of `batches`
    sha256: str  # of the weights that were announced as this version
    scores: int = 0  # first record of `scores` that may still be needed


def write_nothing(directory: Path) -> None: ...


def save(
    directory: Path,
    state: TrainerState[Any],
    position: TrainingPosition,
    keep: int,
    add: Callable[[Path], None] = write_nothing,
) -> None:
    """Write a checkpoint into `directory`, a learner's own, and delete all but the newest `keep` up
    to it. Raises CheckpointError.
    """
    write(directory, state, position.version, add)
    if is_rank_zero():
        complete(directory, position, keep)


def write(
    directory: Path,
    state: TrainerState[Any],
    version: int,
    add: Callable[[Path], None] = write_nothing,
) -> None:
    """Write what a checkpoint of that version consists of, into `directory`, a learner's own. It is
    none before it is complete.

    Every process of the learner writes the parts that it has, into the same place. `add`: writes
    what else belongs to it, into the directory it is given. Raises CheckpointError.
    """
    temporary = _temporary(directory, version)
    try:
        if is_rank_zero():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier(temporary.name)
        levanter.checkpoint.save_checkpoint(
            state.saveable_state, version, str(temporary), is_temporary=False
        )
        add(temporary)
        barrier(path_of(directory, version).name)
    except (OSError, ValueError) as error:
        # ValueError is TensorStore's, with what the operating system said
        raise _failure(directory, version, error) from None


def complete(directory: Path, position: TrainingPosition, keep: int) -> None:
    """Make a checkpoint of what has been written: one process does, for all. Delete all but the
    newest `keep` up to it. Raises CheckpointError.

    Those of later versions stay: a process that was taken for dead may complete one long after
    another has gone on.
    """
    final, temporary = path_of(directory, position.version), _temporary(directory, position.version)
    try:
        (temporary / POSITION).write_text(json.dumps(position._asdict()))
        _delete(final)
        temporary.rename(final)
    except OSError as error:
        raise _failure(directory, position.version, error) from None
    earlier = [version for version in versions(directory) if version <= position.version]
    for version in earlier[:-keep]:
        _delete(path_of(directory, version))


def _temporary(directory: Path, version: int) -> Path:
    """A path of its own: TensorStore remembers what it once found under a path. A process that was
    taken for dead, and is not, has another.
    """
    return directory / f"{TEMPORARY}{path_of(directory, version).name}-{shared_token()}"


def remove_leftovers(directory: Path, announced: int) -> None:
    """Remove what processes that died while they wrote have left, and the checkpoints of versions
    that nobody has announced: they belong to a log that is gone. Only for the one learner that
    writes.
    """
    for left in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    for version in versions(directory):
        if version > announced:
            _delete(path_of(directory, version))


def _failure(directory: Path, version: int, error: Exception) -> CheckpointError:
    shutil.rmtree(_temporary(directory, version), ignore_errors=True)
    hint = "free some space, or raise learner.checkpoint_every"
    return CheckpointError(
        f"checkpoint {path_of(directory, version)} cannot be written ({describe_error(error, 1_000)}); {hint}"
    )


def versions(directory: Path) -> list[int]:
    """Those there are, oldest first."""
    return sorted(int(path.parent.name) for path in directory.glob(f"[0-9]*/{POSITION}"))


def latest(directory: Path, announced: int) -> TrainingPosition | None:
    """The newest checkpoint of a version that is announced. Raises CheckpointError."""
    usable = [version for version in versions(directory) if version <= announced]
    if not usable:
        return None
    path = path_of(directory, usable[-1])
    try:
        return TrainingPosition(**json.loads((path / POSITION).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its {POSITION} cannot be read ({describe_error(error, 1_000)}); delete {path} to go on from the one before"
        ) from None


def load(
    directory: Path, position: TrainingPosition, state: TrainerState[Any]
) -> TrainerState[Any]:
    """The state of a checkpoint; `state` is any of the same shape. To be called inside the
    trainer's mesh. Raises CheckpointError.
    """
    path = path_of(directory, position.version)
    try:
        return cast(
            TrainerState[Any],
            eqx.combine(
                levanter.checkpoint.load_checkpoint(state.saveable_state, str(path)), state
            ),
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded ({describe_error(error, 1_000)}); delete {path} to go on from the one before"
        ) from None


def path_of(directory: Path, version: int) -> Path:
    return directory / f"{version:06d}"


def _delete(path: Path) -> None:
    """First the position: what is left of an interrupted deletion is no checkpoint."""
    (path / POSITION).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
