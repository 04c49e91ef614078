"""Coordination of several JAX processes that form one learner.

Every process runs the same program over the same batches and works on the rows of its devices;
only rank zero writes to the log and the weight store. A computation is collective, so all processes
must reach the next batch, a checkpoint and the end together. With a single process, everything here
but the reports does nothing.

The processes share the run's directory. If one of them dies, JAX ends the others, and all are
started again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

from streamrl.system.errors import ConfigError, WeightError
from streamrl.system.text import one_line

T = TypeVar("T")
INITIALIZATION_TIMEOUT_S = 120  # All processes have to connect within this time.
HEARTBEAT_TIMEOUT_S = 60  # A process that is silent for this long is taken for dead.
SHUTDOWN_TIMEOUT_S = 15  # A process that failed does not wait longer for the others to end, too.


class ProcessRank(NamedTuple):
    """Which of the learner's processes this one is."""

    coordinator: str  # HOST:PORT where rank zero waits for the others.
    processes: int  # How many processes the learner has.
    process: int  # The rank of this one, from 0.


def initialize(rank: ProcessRank) -> None:
    """Connect to the other processes. This must be called before JAX computes anything. Raises
    ConfigError if they do not connect in time.
    """
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
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
    except (RuntimeError, ValueError) as error:
        cause = one_line(error)
        hint = "start every --index of it, with the same --coordinator and --processes"
        raise ConfigError(
            f"the learner's {rank.processes} processes did not meet at {rank.coordinator}"
            f" ({cause}); {hint}"
        ) from None


def is_rank_zero() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


@cache
def shared_token() -> str:
    """A random token that is the same in all processes of this learner and in no others. The first
    call is collective.
    """
    mine = np.frombuffer(secrets.token_bytes(8), np.uint32)
    return np.asarray(process_allgather(mine)).reshape(-1, 2)[0].tobytes().hex()


def barrier(what: str) -> None:
    """Wait until every process has reached `what`."""
    if jax.process_count() > 1:
        sync_global_devices(what)


def report(what: str, outcome: str) -> None:
    """Tell the other processes how something ended in this one. `what` names it, and is used once.

    Unlike a barrier this is no computation on the devices, so any thread may call it while another
    one trains.
    """
    _client().key_value_set(f"{what}/{jax.process_index()}", outcome)


def wait_for_report(what: str, process: int, timeout_s: float) -> str:
    """What another process reports. Any thread may wait for it. Raises WeightError when `timeout_s`
    are over.
    """
    try:
        return _client().blocking_key_value_get(f"{what}/{process}", int(timeout_s * 1_000))
    except RuntimeError as error:
        raise WeightError(
            f"process {process} of the learner did not write its part of {what} within"
            f" {timeout_s:g} s ({one_line(error)}); see its log"
        ) from None


def forget_reports(what: str) -> None:
    """Forget the reports below a name, once no process waits for them."""
    _client().key_value_delete(what)


def _client() -> Any:
    """The connection to the service through which JAX's processes find each other."""
    return cast(Any, jax_distributed).global_state.client


def rank_zero_first(make: Callable[[], T]) -> T:
    """Call `make` in rank zero, and then in the other processes, which find what it made."""
    if is_rank_zero():
        result = make()
        barrier("made")
        return result
    barrier("made")
    return make()


def synchronized(items: Iterator[T | None], stop: threading.Event) -> Iterator[T]:
    """Yield each item once all processes have it, and end as soon as one of them is told to stop.
    `items` yields the same items in every process, and None while there is nothing.
    """
    mine: T | None = None
    while True:
        mine = next(items) if mine is None else mine
        # (processes, 2) bool
        everyone = np.asarray(process_allgather(np.array([mine is not None, stop.is_set()])))
        if everyone[:, 1].any():
            return
        if mine is not None and everyone[:, 0].all():
            yield mine
            mine = None
