"""The settings that a resumed run (`streamrl up --resume`) cannot change, and what to do instead.

All other settings take effect when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamrl.config.checks.learner import steps_without_rate
from streamrl.config.choices import OPTIMIZER_STATE
from streamrl.config.run_file import RunFile

ELSEWHERE = "begin a new run, or fork this one (`streamrl fork`)"
FIXED = {
    "run": "it names the run's topics and its directory",
    "model.path": f"every version is trained from that model; {ELSEWHERE}",
    "model.tiny": f"the model is made at the run's beginning; {ELSEWHERE}",
    "buffer.shards": f"each shard has its own journal, for its partitions; {ELSEWHERE}",
    "learner.name": (
        "buffer, batcher and servers follow the versions of that learner; begin a second one with"
        " `streamrl learner --name`"
    ),
    **dict.fromkeys(
        (f"learner.{name}" for name in OPTIMIZER_STATE),
        "the optimizer's state in the checkpoints depends on it; begin a new run from an export"
        " (`streamrl export-model`, then model.path)",
    ),
    "learner.lora": f"every version is an adapter of that shape, or a whole model; {ELSEWHERE}",
    "fork": "it records what the run began with, and is written by `streamrl fork`",
}
"""Setting or section -> why it cannot change.

`topic_changes.apply` refuses another number of partitions or replicas for topics that hold data.
"""


def refusals(before: RunFile, now: RunFile) -> Iterator[str]:
    """One sentence for each setting that differs and cannot change."""
    was = before.model_dump(mode="json")
    wanted = now.model_dump(mode="json")
    for path, why in FIXED.items():
        old = _at(was, path)
        new = _at(wanted, path)
        if old != new and not (path == "model.tiny" and now.model.path):
            yield f"{path} cannot be changed in a run that is gone on with: {why}"
    if not now.model.path and before.model.max_seq_len != now.model.max_seq_len:
        yield (
            "model.max_seq_len cannot be changed in a run that is gone on with: the model was made"
            f" for {before.model.max_seq_len}; {ELSEWHERE}"
        )
    yield from _stretched_schedule(before, now)
    yield from steps_without_rate(now)


def _stretched_schedule(before: RunFile, now: RunFile) -> Iterator[str]:
    """A schedule without its own steps in the run file follows `orchestrator.max_steps`. More
    steps would then change the learning rates of the steps that are trained already.
    """
    then = before.learner.schedule
    schedule = now.learner.schedule
    if then is None or schedule is None:
        return
    was = then.steps
    steps = schedule.steps
    if was and steps != was and "steps" not in schedule.model_fields_set:
        yield (
            f"orchestrator.max_steps {steps} would change the learning rates of steps that are"
            f" trained already: the run's learner.schedule.steps is {was}, and the run file gives"
            f" none; set learner.schedule.steps, to {was} for the same rates or to {steps} for"
            " others from here on"
        )


def _at(data: Any, path: str) -> Any:
    for name in path.split("."):
        data = data[name]
    return data
