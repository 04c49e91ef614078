"""A short recorded run, and forks of it."""

from __future__ import annotations

from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import ForkResult, copy_inherited
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Batch, EnvProgress
from tests.support.data_path import RUN, TOPICS, play, publish, published

ENVS = {f"journal.env-{env}-0": 1 for env in RUN.envs}
VERSION = 2


def recorded_run() -> MemoryLog:
    """Four batches, more rollouts than they took, and envs that have posed 40 problems each."""
    log = MemoryLog({**TOPICS, **ENVS})
    for env in RUN.envs:
        publish(
            log,
            Output(
                f"journal.env-{env}-0",
                f"{env}-0",
                EnvProgress(producer=f"{env}-0", next_problem=40, published_groups=40),
            ),
        )
    play(log)
    return log


def fork(
    log: MemoryLog,
    *overrides: str,
    version: int = VERSION,
    with_rollouts: bool = True,
    parent: RunFile = RUN,
) -> tuple[ForkResult, MemoryLog]:
    run = child_run_file(parent, "other", overrides).model_copy(
        update={"fork": Fork(run=parent.run, version=version, sha256="ab")}
    )
    new = MemoryLog({**TOPICS, **ENVS})
    return copy_inherited(
        log, new, parent, run, "file:///new/v000002", with_rollouts, time_s=1.0
    ), new


def batches(log: MemoryLog) -> list[Batch]:
    return published(log, "batches", Batch)
