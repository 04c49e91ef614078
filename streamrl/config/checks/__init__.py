"""Settings that cannot work together, a module for each of the run file's sections. An
extension has those of its own section. A problem is a sentence that names the key and what to
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config.checks.batches import curriculum_problems, size_problems
from streamrl.config.checks.envs import env_problems
from streamrl.config.checks.learner import (
    loss_problems,
    schedule_problems,
    steps_without_rate,
)
from streamrl.config.checks.operation import placement_problems, secret_problems
from streamrl.config.checks.serving import eval_problems, guest_problems, pool_problems
from streamrl.config.extensions import extensions

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile


def problems(run: RunFile, resolved: bool) -> Iterator[str]:
    """Every problem of this run file.

    `resolved`: the file is the one that a run keeps; changes in it are checked when the run is
    resumed (`run/orchestrator/resuming.py`).
    """
    yield from env_problems(run)
    yield from pool_problems(run)
    yield from eval_problems(run)
    yield from curriculum_problems(run)
    yield from secret_problems(run)
    yield from placement_problems(run)
    yield from guest_problems(run)
    yield from size_problems(run)
    yield from loss_problems(run)
    yield from schedule_problems(run)
    for extension in extensions().values():
        yield from extension.problems(run)
    if not resolved:
        yield from steps_without_rate(run)
