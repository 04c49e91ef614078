from __future__ import annotations

import pytest

from streamrl.config.metric_spec import MetricSpec, prometheus_name


@pytest.mark.parametrize(
    ("spec", "prometheus", "labels"),
    [
        (MetricSpec("a/b_s", "s", ""), "streamrl_a_b_s", ()),
        (MetricSpec("a/b", "1", "", "counter"), "streamrl_a_b_total", ()),
        (MetricSpec("a/{env}/b/{fate}", "1", ""), "streamrl_a_b", ("env", "fate")),
    ],
)
def test_a_metric_in_prometheus(spec: MetricSpec, prometheus: str, labels: tuple[str, ...]):
    assert (spec.prometheus, spec.labels) == (prometheus, labels)


def test_what_prometheus_does_not_take_is_replaced():
    assert prometheus_name("evals/a b/pass@4") == "streamrl_evals_a_b_pass_4"
