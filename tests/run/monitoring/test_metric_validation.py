import pytest

from streamrl.run.monitoring.metric_validation import validate_metric
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Metric
from tests.run.monitoring.events import event, metric


@pytest.mark.parametrize(
    ("forged", "left"),
    [
        (
            metric({"batcher/blocked_s": 1.0, "batcher/batch_age_mean": float("inf")}),
            {"batcher/blocked_s"},
        ),
        (metric({"batcher/blocked_s": float("nan")}), set[str]()),
        (
            metric({"batcher/blocked_s": 1.0, "env/rollouts_per_s": 1.0}, source="env-copy-0"),
            {"env/rollouts_per_s"},
        ),
        (metric({"orchestrator/active_s": 1e9}, source="env-copy-0"), set[str]()),
        (metric({"orchestrator": 1.0, "orchestrators/x": 1.0}), {"orchestrators/x"}),
        (
            metric({"inference/mismatch_tokens": 2.0}, source="inference-0"),
            {"inference/mismatch_tokens"},
        ),
        (metric({"batcher/blocked_s": 1.0}, time_s=float("inf")), None),
        (metric({"batcher/blocked_s": 1.7e308}), set[str]()),
        (metric({"batcher/blocked_s": 1.0}, step=1 << 40), None),
        (metric({"batcher/blocked_s": 1.0}, step=-1), None),
        (
            event(
                "metrics",
                "env-copy-0",
                Metric(source="batcher", time_s=1.0, values={"batcher/blocked_s": 1.0}),
            ),
            None,
        ),
    ],
)
def test_a_metric_is_believed_as_far_as_its_record_shows_that_it_is_one(
    forged: Event, left: set[str] | None
):
    metric = validate_metric(forged, version=3)
    assert (metric and set(metric.values)) == left
