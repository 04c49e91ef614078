"""The sections of a run's operation: when it ends, what it reports, where it runs, what stays."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from streamrl.config.choices import SINKS
from streamrl.config.sections.batches import Target
from streamrl.config.sections.section import Section, one_of


class SinkSetting(Section):
    """A sink that the orchestrator writes the run's metrics to (docs/metrics.md). A sink without
    params can be given by its name alone.
    """

    # console, jsonl, tensorboard, wandb, mlflow, one that an installed package adds, or
    # MODULE:NAME.
    kind: Annotated[str, one_of(*SINKS, group="streamrl.sinks")]
    # Arguments of the sink, such as `mode: offline` of wandb. Secrets belong into its own
    # environment variables.
    params: dict[str, Any] = {}


class Orchestrator(Section):
    """When the run ends, and where its metrics go."""

    target: Target | None = None  # The run ends well when this is reached.
    max_steps: int = Field(default=0, ge=0)  # The run ends well after so many steps. 0: no limit.
    # Limit of the time that the run has had a server, over all its starts. 0: no limit. With a
    # target it is a failure to reach the limit first.
    max_wall_s: float = Field(default=0.0, ge=0)
    # Where metrics go, such as [jsonl, tensorboard, {kind: wandb, params: {project: digits}}].
    sinks: list[SinkSetting] = [SinkSetting(kind="jsonl")]

    @field_validator("sinks", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return (
            [{"kind": sink} if isinstance(sink, str) else sink for sink in value]
            if isinstance(value, list)
            else value
        )


class Metrics(Section):
    """The pages /livez, /readyz, /progressz and /metrics that every part serves (docs/metrics.md).
    Those who reach them can read them and change nothing.
    """

    serve: bool = True  # Whether parts serve pages of health and metrics.


class Placement(Section):
    """Where a part is, or all parts of a role, and what each of them gets there."""

    # Numbers of the GPUs, from 0, among those that `streamrl up` sees.
    devices: list[Annotated[int, Field(ge=0)]] = []
    # Names of the machines that have such GPUs, where a run is on several, of letters, digits, '.',
    # '_' and '-'; the parts are divided evenly among them. Empty: that of the learner.
    nodes: list[str] = []
    # CPUs that Slurm, Ray or Kubernetes reserves for each part, which may be a fraction of one.
    cpus: float = Field(default=1.0, gt=0)
    # Memory that they reserve for each part, in GiB. 0: what is usual there.
    memory_gib: float = Field(default=0.0, ge=0)
    # Share of each GPU's memory that a learner or scorer reserves. 0: three quarters, as JAX does,
    # or 0.5 of a GPU that it shares with other parts. Servers: `gpu_memory_utilization` in
    # inference.engine, by default 0.9, or their part of 0.35 of a shared GPU.
    memory_fraction: float = Field(default=0.0, ge=0, le=1)


class Topics(Section):
    """The run's topics on the broker."""

    # Partitions of each topic of rollouts or groups. They stay the same for the whole run.
    partitions: int = Field(default=1, ge=1)
    # Copies of each partition. By default 3 on a cluster of three brokers or more, else 1.
    replicas: int | None = Field(default=None, ge=1)
    retention_hours: float = Field(default=168, gt=0)  # Records are kept at least this long.
    # When a part starts and retention has deleted what it needs: stop with an error, or expire it.
    on_removed: Literal["stop", "expire"] = "stop"
    # Further settings of every topic. Those that delete (retention.*, cleanup.policy) apply to
    # topics with a retention only.
    config: dict[str, str] = {}

    @property
    def snapshot_s(self) -> float:
        """The longest time between two snapshots of a part: an eighth of the retention, so that a
        part that was killed can start again within seven eighths.
        """
        return self.retention_hours * 3600 / 8


class Fork(Section):
    """The version of another run that this run begins with. `streamrl fork` writes this section;
    it is not written by hand.
    """

    run: str  # Name of the parent run.
    # Policy version of the parent. The fork's first batch has this number.
    version: int = Field(ge=0)
    sha256: str  # SHA-256 of that version's weights.
    # Tokens that the parent owed to each share of a batch (batcher/selection.py).
    balance: dict[str, float] = {}
    stage: int = 0  # Stage of the curriculum that the parent had reached (batcher/curriculum.py).
    rewards: dict[str, list[float]] = {}  # Rewards of the parent's last batches by env.
    # Scorers whose rewards its first rollouts have: NAME@VERSION each (`streamrl fork --rewards`).
    scorers: list[str] = []
