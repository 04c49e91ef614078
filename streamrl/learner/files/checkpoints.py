"""The learner's state on disk: parameters, optimizer state, step, random key, and `position.json`,
which has the place in `batches` that the state belongs to.

A checkpoint is copied off the devices while training pauses, and written during the next steps. It
appears by a rename and disappears by the deletion of its `position.json`, so half of one is never
seen. The weights that servers pull are in the weight store, not here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import levanter.checkpoint
import tensorstore
from haliax.jax_utils import is_jax_array_like
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.experimental.array_serialization.tensorstore_impl import async_serialize
from levanter.tensorstore_serialization import tree_deserialize_leaves_tensorstore
from levanter.trainer_state import TrainerState

from streamrl.learner.parallel.distributed import barrier, is_rank_zero, shared_token
from streamrl.system.errors import CheckpointError, describe_error

# TensorStore warns of every part of the optimizer's state that has no values.
logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)

POSITION = "position.json"
TEMPORARY = ".tmp-"
WRITE_TIMEOUT_S = 1800  # For so long a process waits for the files of the others.
# JAX's own context caches 10 GB: a state would stay in memory after it was written or read.
UNCACHED = {
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#remote": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": 128},
    "file_io_concurrency": {"limit": 128},
}


class TrainingPosition(NamedTuple):
    """Where training has got to: the version of the policy, and where to read on."""

    version: int  # The version of the policy in this state.
    offset: int  # The next record of `batches`.
    sha256: str  # The hash that the version is announced with; empty until it is known.
    scores: int = 0  # The first record of `scores` that may still be needed.


class UncachedCheckpointManager(GlobalAsyncCheckpointManager):
    """Writes and reads arrays by TensorStore, and keeps nothing of them in memory afterwards."""

    def serialize(
        self,
        arrays: Any,
        tensorstore_specs: Sequence[dict[str, Any]],
        *,
        on_commit_callback: Callable[[], None] | None = None,
        transaction: Any = None,
    ) -> None:
        """Begin to write the arrays.

        All are opened under one context, because arrays of one context are committed together.
        Arrays that have a context each write the directory of their database again and again: a
        hundred arrays became 6,000 files.
        """
        self.wait_until_finished()
        context = tensorstore.Context(UNCACHED)
        commits: list[Any] = []

        async def copy() -> None:
            await asyncio.gather(
                *(
                    async_serialize(
                        array,
                        spec,
                        commit_future=commits,
                        context=context,
                        transaction=transaction,
                    )
                    for array, spec in zip(arrays, tensorstore_specs, strict=True)
                )
            )

        asyncio.run(copy())
        self._add_futures(commits)
        self._start_async_commit(on_commit_callback)

    def deserialize(
        self,
        shardings: Any,
        tensorstore_specs: Sequence[dict[str, Any]],
        *rest: Any,
        **options: Any,
    ) -> Any:
        uncached = [{**spec, "context": UNCACHED} for spec in tensorstore_specs]
        return super().deserialize(shardings, uncached, *rest, **options)


def write_nothing(directory: Path) -> None: ...


def save(
    directory: Path,
    state: TrainerState[Any],
    position: TrainingPosition,
    keep: int,
    add: Callable[[Path], None] = write_nothing,
) -> None:
    """Write a checkpoint into `directory`, which belongs to one learner, and delete all older
    checkpoints but the newest `keep`. Raises CheckpointError.
    """
    begin(directory, state, position.version, add).wait()
    if is_rank_zero():
        complete(directory, position, keep)


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint whose state has been copied off the devices, and is being written."""

    directory: Path
    version: int
    manager: GlobalAsyncCheckpointManager
    add: Callable[[Path], None]

    def wait(self) -> None:
        """Wait until all processes have written all files. They become a checkpoint when `complete`
        is called. All processes call this, in any thread. Raises CheckpointError, and what `add`
        raises.
        """
        try:
            self.manager.wait_until_finished()
            self.add(_temporary(self.directory, self.version))
        except (OSError, ValueError) as error:
            # ValueError is TensorStore's, with the operating system's message
            raise _failure(self.directory, self.version, error) from None


def begin(
    directory: Path,
    state: TrainerState[Any],
    version: int,
    add: Callable[[Path], None] = write_nothing,
) -> PendingCheckpoint:
    """Begin to write the files of a checkpoint of `version` into `directory`. When this returns,
    the state has been copied off the devices, and training may change it.

    All processes of the learner call this together, and each writes its own shards. `add` is called
    with the directory at the end, by all processes, and writes additional files. Raises
    CheckpointError.
    """
    temporary = _temporary(directory, version)
    manager = UncachedCheckpointManager(timeout_secs=WRITE_TIMEOUT_S)
    try:
        if is_rank_zero():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier(temporary.name)
        levanter.checkpoint.save_checkpoint(
            state.saveable_state, version, str(temporary), manager=manager, is_temporary=False
        )
    except (OSError, ValueError) as error:
        raise _failure(directory, version, error) from None
    return PendingCheckpoint(directory, version, manager, add)


def complete(directory: Path, position: TrainingPosition, keep: int) -> None:
    """Turn the written files into a checkpoint, and delete all older checkpoints but the newest
    `keep`. One process does this for all. Raises CheckpointError.

    Checkpoints of later versions stay: a process that was taken for dead may complete an old
    checkpoint long after its successor has moved on.
    """
    final = path_of(directory, position.version)
    temporary = _temporary(directory, position.version)
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
    """The directory that a checkpoint is written to before it is complete.

    The name is unique to this learner process, because TensorStore caches what it once found under
    a path, and because a process that was taken for dead may still write to its own.
    """
    return directory / f"{TEMPORARY}{path_of(directory, version).name}-{shared_token()}"


def remove_leftovers(directory: Path, announced: int) -> None:
    """Delete incomplete checkpoints of processes that died, and checkpoints of versions that were
    never announced, which belong to a log that no longer exists. Only the one learner that writes
    may call this.
    """
    for left in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    complete = versions(directory)
    for path in directory.glob("*"):
        if not path.name.isdecimal() or not path.is_dir():
            continue
        # One without a position was being deleted when its process died.
        if int(path.name) > announced or int(path.name) not in complete:
            _delete(path)


def _failure(directory: Path, version: int, error: Exception) -> CheckpointError:
    shutil.rmtree(_temporary(directory, version), ignore_errors=True)
    hint = "free some space, or raise learner.checkpoint_every"
    return CheckpointError(
        f"checkpoint {path_of(directory, version)} cannot be written"
        f" ({describe_error(error, 1_000)}); {hint}"
    )


def versions(directory: Path) -> list[int]:
    """Versions that have a complete checkpoint, oldest first."""
    names = [path.parent.name for path in directory.glob(f"*/{POSITION}")]
    return sorted(int(name) for name in names if name.isdecimal())


def latest(directory: Path, announced: int) -> TrainingPosition | None:
    """The newest checkpoint whose version is announced, or None. Raises CheckpointError."""
    usable = [version for version in versions(directory) if version <= announced]
    if not usable:
        return None
    path = path_of(directory, usable[-1])
    try:
        return TrainingPosition(**json.loads((path / POSITION).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its {POSITION} cannot be read ({describe_error(error, 1_000)});"
            f" delete {path} to continue from the one before"
        ) from None


def load(
    directory: Path, position: TrainingPosition, state: TrainerState[Any]
) -> TrainerState[Any]:
    """Load the state of a checkpoint. `state` is any state of the same shape. This must be called
    inside the trainer's mesh. Raises CheckpointError.
    """
    path = path_of(directory, position.version)
    arrays = eqx.filter(state.saveable_state, is_jax_array_like)
    try:
        loaded = tree_deserialize_leaves_tensorstore(
            str(path), arrays, manager=UncachedCheckpointManager()
        )
        return cast(TrainerState[Any], eqx.combine(loaded, state))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded ({describe_error(error, 1_000)}); delete {path} to"
            " continue from the one before"
        ) from None


def version_name(version: int) -> str:
    """The name of a checkpoint's directory."""
    return f"{version:06d}"


def path_of(directory: Path, version: int) -> Path:
    return directory / version_name(version)


def _delete(path: Path) -> None:
    """Delete a checkpoint. Its position goes first, so that an interrupted deletion leaves no
    checkpoint.
    """
    (path / POSITION).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
