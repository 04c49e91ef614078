"""Writes metrics to Weights & Biases. All starts of a run belong to one W&B run.

The key comes from `wandb login` or WANDB_API_KEY. With `mode: offline`, nothing leaves the machine,
and `wandb sync` sends the sessions in `wandb/` of the run's directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from streamrl.run.monitoring.sinks.base import MetricRecord, SinkContext

STEP = "step"  # the x axis, as W&B's own step only counts rows


class WandB:
    """Continues the W&B run of the earlier starts."""

    def __init__(
        self,
        context: SinkContext,
        project: str = "streamrl",
        name: str = "",
        id: str = "",
        mode: str = "",
        **options: Any,
    ) -> None:
        """`name` and `id` are those of the W&B run, by default the run's name. `mode` is online,
        offline or disabled. `options` are passed to `wandb.init`, as `entity` and `tags`.
        """
        run = context.run
        run.directory.mkdir(parents=True, exist_ok=True)
        wait_for_a_name(run.directory / "wandb")
        quiet = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            save_code=False,
            disable_git=True,
        )
        arguments: dict[str, Any] = {
            "mode": mode or None,
            "config": run.model_dump(mode="json"),
            "dir": str(run.directory),
            "settings": quiet,
        }
        self._run = wandb.init(
            project=project,
            name=name or run.run,
            id=id or run.run,
            resume="allow",
            **arguments,
            **options,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            for row in record.rows:
                self._run.log({STEP: row.step, **row.values})

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # `finish` does not wait for W&B's own process, which writes the files.


def wait_for_a_name(directory: Path) -> None:
    """Wait until no session directory has the name that W&B would give to this one.

    W&B names the directory by the second in which a session begins. A second session in the same
    second would overwrite the first.
    """
    while any(directory.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)
