"""A run's metrics as its topic holds them, for tests of sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import run_file
from streamrl.run.monitoring.sinks.base import MetricRecord, Sink, SinkContext
from streamrl.run.monitoring.sinks.curve import Curves
from streamrl.run.monitoring.sinks.runner import running
from streamrl.stream.records import Metric

LEAD = "learner-lead"


def context(
    directory: Path,
    say: Callable[[str], None] = print,
    since_s: float = 0.0,
    sinks: Sequence[Any] = (),
) -> SinkContext:
    run = run_file.parse(
        {
            "run": "digits",
            "runs_dir": str(directory),
            "envs": {"copy": {}},
            "orchestrator": {"sinks": list(sinks)},
        }
    )
    (directory / "digits").mkdir(exist_ok=True)
    return SinkContext(run, say, since_s)


def records(steps: range, tries: int = 1) -> list[Metric]:
    """Each step: a gauge, a batch, a loss, and every second one an evaluation. `tries`: a learner
    that crashed measures its step so often.
    """
    found: list[Metric] = []
    for step in steps:
        time_s = 1_000.0 + step
        found.append(
            Metric(source="buffer", time_s=time_s, values={"worker/process_latency_s": step / 100})
        )
        found.append(
            Metric(
                source="batcher",
                time_s=time_s,
                step=step,
                values={"batches/copy/reward/mean": step / 10},
            )
        )
        found += [
            Metric(source=LEAD, time_s=time_s, step=step, values={"learner/loss": 1.0 / (step + 1)})
            for _ in range(tries)
        ]
        if step % 2 == 0:
            found.append(
                Metric(
                    source="evaluator",
                    time_s=time_s,
                    step=step,
                    values={"evals/hard/pass@4": step / 100},
                )
            )
    return found


def curves(steps: range) -> dict[str, dict[int, float]]:
    """What of it is to be in a sink."""
    return {
        "worker/process_latency_s/buffer": {step: step / 100 for step in steps},
        "batches/copy/reward/mean": {step: step / 10 for step in steps},
        "learner/loss": {step: 1.0 / (step + 1) for step in steps},
        "evals/hard/pass@4": {step: step / 100 for step in steps if step % 2 == 0},
    }


def entries(told: Sequence[Metric]) -> list[MetricRecord]:
    """With holes between offsets, as a topic has them."""
    fold = Curves(LEAD)
    return [fold.entry(3 * number, metric) for number, metric in enumerate(told)]


def tell(sink: Sink, told: Sequence[MetricRecord], at_once: int = 4) -> None:
    for start in range(0, len(told), at_once):
        sink.write(told[start : start + at_once])


def only_once(points: Sequence[tuple[str, int, float]]) -> dict[str, dict[int, float]]:
    """Points by curve; no step of a curve may come twice."""
    found: dict[str, dict[int, float]] = {}
    for name, step, value in points:
        assert step not in found.setdefault(name, {}), f"{name} has step {step} twice"
        found[name][step] = value
    return found


def lives(directory: Path, kind: str, **params: str) -> None:
    """A run of three sessions that writes to a sink. In the second one nothing happens."""
    made = context(directory, sinks=({"kind": kind, "params": params},))
    for known in (3, 3, 7):  # The steps that there are at the end of each session.
        with running(made) as sinks:
            sinks.write(enumerate(records(range(known))))


def assert_whole(points: Sequence[tuple[str, int, float]]) -> None:
    """What `lives` wrote has every step of every curve, and each of them once."""
    found = only_once(points)
    assert {name: dict(sorted(curve.items())) for name, curve in found.items()} == {
        name: {step: pytest.approx(value, rel=1e-6) for step, value in curve.items()}
        for name, curve in curves(range(7)).items()
    }
