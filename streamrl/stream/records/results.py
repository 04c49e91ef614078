"""What is measured of a run, and its run file."""

from __future__ import annotations

from streamrl.stream.records.fields import (
    Array,
    Name,
    Record,
    check_floats,
    check_lengths,
    total_of,
)


class Metric(Record, frozen=True, kw_only=True):
    """Values of one part at one moment, by name (`run/monitoring/metric_names.py`)."""

    source: Name
    time_s: float
    values: dict[str, float]
    step: int | None = None  # the batch or version they belong to


class PassAt(Record, frozen=True, array_like=True, kw_only=True):
    """pass@k over `problems` problems, with its confidence interval
    (`extensions/evaluator/estimates.py`).
    """

    k: int
    problems: int  # those with at least k answers
    value: float
    low: float
    high: float


class Evaluation(Record, frozen=True, kw_only=True):
    """The results of one policy version on held-out problems. Every token that is counted was
    sampled by that version. Nothing is trained on it.
    """

    name: Name  # of the evaluation in the run file
    environment: Name  # of the run
    learner: Name
    version: int
    sha256: str  # of the version
    problems: Array  # (p,) int64: their numbers
    samples: Array  # (p,) int32: answers to each
    passed: Array  # (p,) int32: of these, how many were right
    rewards: Array  # (sum of samples,) float32
    pass_at: list[PassAt]
    reward_mean: float  # of the problems' means
    reward_low: float
    reward_high: float
    truncated: int = 0  # answers that a limit ended
    # answers that were thrown away, and asked for again: failed, or of another version in part
    repeated: int = 0
    too_slow: int = 0  # answers among `samples` that did not come in time, and are wrong for that
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    max_tokens: int = 0
    seed: int = 0
    time_s: float = 0.0  # when it ended
    seconds: float = 0.0  # it took

    def __post_init__(self) -> None:
        what = f"evaluation {self.name!r} of version {self.version}"
        check_lengths(what, self, ("samples", "passed"), len(self.problems))
        check_floats(f"{what}: rewards", self.rewards, total_of(f"{what}: samples", self.samples))
        if (self.passed > self.samples).any():
            raise ValueError(f"{what}: more answers are right than there are")


class RunConfig(Record, frozen=True, kw_only=True):
    """The resolved run file. A change is another record."""

    run: str
    text: str  # JSON
    time_s: float
