"""Several JAX processes that are one learner: what they agree on.

Each runs the same program over the same batches, on the rows of its own devices; only the first one
writes. A computation of one is a computation of all, so they have to come to it together: to the
next batch, to a checkpoint, to their end. With one process, all of this is nothing.

They share the run's directory. When one dies, JAX ends the others: crash-only, like every part; all
are started again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

from streamrl.errors import ConfigError, one_line

T = TypeVar("T")
INITIALIZATION_TIMEOUT_S = 120  # within which all have to be there
HEARTBEAT_TIMEOUT_S = 60  # after which one is taken for dead


class ProcessRank(NamedTuple):
    """Which of the processes this one is."""

    coordinator: str  # HOST:PORT where the first one waits for the others
    processes: int
    process: int  # from 0


def initialize(rank: ProcessRank) -> None:
    """Meet the others; before JAX computes anything. Raises ConfigError when they do not come."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(
            *rank,
            cluster_detection_method="deactivate",
            # otherwise it listens on every address
            coordinator_bind_address=rank.coordinator if rank.process == 0 else None,
            initialization_timeout=INITIALIZATION_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:
        said = one_line(error)
        hint = "start every --index of it, with the same --coordinator and --processes"
        raise ConfigError(
            f"the learner's {rank.processes} processes did not meet at {rank.coordinator} ({said}); {hint}"
        ) from None


def device_count() -> int:
    """Of all the processes."""
    return jax.device_count()


def is_rank_zero() -> bool:
    """Is this the process that writes?"""
    return jax.process_index() == 0


@cache
def shared_token() -> str:
    """The same in all processes of this learner, and in no others. They come to it together the
    first time.
    """
    mine = np.frombuffer(secrets.token_bytes(8), np.uint32)
    return np.asarray(process_allgather(mine)).reshape(-1, 2)[0].tobytes().hex()


def barrier(what: str) -> None:
    """Until every process has come to `what`."""
    if jax.process_count() > 1:
        sync_global_devices(what)


def rank_zero_first(make: Callable[[], T]) -> T:
    """What `make` makes or finds: the first process makes it, and the others find it."""
    if is_rank_zero():
        made = make()
        barrier("made")
        return made
    barrier("made")
    return make()


def synchronized(found: Iterator[T | None], stop: threading.Event) -> Iterator[T]:
    """What all have found, one by one, until one of them is to stop. `found`: the same in every
    process but for the Nones, while there is nothing.
    """
    mine: T | None = None
    while True:
        mine = next(found) if mine is None else mine
        # (processes, 2) bool
        everyone = np.asarray(process_allgather(np.array([mine is not None, stop.is_set()])))
        if everyone[:, 1].any():
            return
        if mine is not None and everyone[:, 0].all():
            yield mine
            mine = None
