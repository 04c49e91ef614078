from __future__ import annotations

from streamrl.run.monitoring.sinks.curve import Curves
from streamrl.stream.records import Metric


def metric(source: str, step: int | None, **values: float) -> Metric:
    return Metric(
        source=source,
        time_s=9.0,
        step=step,
        values={name.replace("__", "/"): value for name, value in values.items()},
    )


def test_what_has_no_step_is_taken_with_the_leads_next_one():
    fold = Curves("learner-lead")
    assert fold.entry(0, metric("inference-0", None, inference__in_flight=3.0)).rows == ()
    assert fold.entry(1, metric("inference-0", None, inference__in_flight=5.0)).rows == ()
    [batch] = fold.entry(2, metric("batcher", 7, batcher__tokens_total=80.0)).rows
    assert (batch.step, batch.values) == (7, {"batcher/tokens_total": 80.0})
    step, gauges = fold.entry(3, metric("learner-lead", 7, learner__loss=0.5)).rows
    assert (step.step, step.values) == (7, {"learner/loss": 0.5})
    assert (gauges.step, gauges.values) == (7, {"inference/in_flight/inference-0": 5.0})
    assert len(fold.entry(4, metric("learner-other", 7, learner__loss=0.4)).rows) == 1
