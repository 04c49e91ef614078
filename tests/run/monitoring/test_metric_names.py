"""The list of metrics, against what parts publish and Prometheus's rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.config import topology
from streamrl.config.metric_spec import prometheus_name
from streamrl.run.monitoring.metric_names import (
    METRICS,
    find_metric,
    series_name,
    table,
)

# What a name begins with: a role, or another first piece of the list.
BEGINNINGS = {
    *(role.name for role in topology.roles()),
    *(spec.name.partition("/")[0] for spec in METRICS),
}
LITERAL = re.compile(rf'f?"((?:{"|".join(sorted(BEGINNINGS))})/[^" ]+)"')
SOURCES = [
    p for p in (Path(__file__).parents[3] / "streamrl").rglob("*.py") if p.name != "metric_names.py"
]


@pytest.mark.parametrize(
    ("name", "prometheus", "labels"),
    [
        (
            "replays/copy-digits/reward/mean",
            "streamrl_replays_reward_mean",
            {"environment": "copy-digits"},
        ),
        (
            "replays/copy/rewards/exact match/std",
            "streamrl_replays_rewards_std",
            {"environment": "copy", "reward": "exact match"},
        ),
        ("evals/hard/pass@4", "streamrl_evals_pass", {"evaluation": "hard", "k": "4"}),
        ("evals/behind_versions", "streamrl_evals_behind_versions", {}),
        ("part/lag_records/rollouts.copy", "streamrl_part_lag_records", {"topic": "rollouts.copy"}),
        (
            "orchestrator/fates/copy/expired",
            "streamrl_orchestrator_fates_total",
            {"environment": "copy", "fate": "expired"},
        ),
        ("inference/generated_tokens", "streamrl_inference_generated_tokens_total", {}),
        (
            "assembler/open_sessions/agents",
            "streamrl_assembler_open_sessions",
            {"environment": "agents"},
        ),
    ],
)
def test_a_name_and_its_labels(name: str, prometheus: str, labels: dict[str, str]):
    found = find_metric(name)
    assert found is not None
    assert (
        found[0].prometheus == prometheus
        and dict(zip(found[0].labels, found[1], strict=True)) == labels
    )


def test_what_is_not_in_the_list_has_a_name_all_the_same():
    assert (
        find_metric("learner/my own_thing") is None
        and prometheus_name("learner/my own_thing") == "streamrl_learner_my_own_thing"
    )


def test_names_differ_and_are_what_prometheus_takes():
    names = [known.prometheus for known in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) for name in names)
    assert not any({"run", "part", "instance", "job"} & set(known.labels) for known in METRICS)


def test_a_curve_has_the_part_behind_its_name_where_each_part_has_one():
    assert series_name("learner-lead", "learner/loss", "learner-lead") == "learner/loss"
    assert (
        series_name("learner-other", "learner/loss", "learner-lead") == "learner/loss/learner-other"
    )
    assert (
        series_name("inference-1", "inference/swap_s", "learner-lead")
        == "inference/swap_s/inference-1"
    )
    assert series_name("buffer", "buffer/version", "learner-lead") == "buffer/version"
    assert series_name("buffer-1", "buffer/version", "learner-lead") == "buffer/version/buffer-1"
    assert series_name("buffer", "worker/busy_frac", "learner-lead") == "worker/busy_frac/buffer"
    assert (
        series_name("batcher", "batches/copy/reward/mean", "learner-lead")
        == "batches/copy/reward/mean"
    )


def test_the_table_has_a_row_for_each():
    rows = table().splitlines()[2:]
    assert len(rows) == len(METRICS)
    assert "| `part/transactions` | transactions committed (counter) |" in rows


def test_every_name_in_the_sources_is_in_the_list():
    """Braces of an f-string stand for anything. Names that are put together are passed over: of
    those the parts' own tests see whole ones.
    """
    names = {name for path in SOURCES for name in LITERAL.findall(path.read_text())}
    assert len(names) > 40
    whole = [
        name
        for name in names
        if not name.endswith("/")
        and not re.fullmatch(r"\w+/\{name\}(/\{env\})?|replays/\{env\}/\{name\}", name)
    ]
    # what is written may be the beginning of a name
    beginnings = tuple(known.name for known in METRICS)
    unknown = [
        n
        for n in whole
        if not find_metric(re.sub(r"\{[^}]*\}", "x", n))
        and not any(b.startswith(n) for b in beginnings)
    ]
    assert sorted(unknown) == [], (
        "add a line for each of these to CORE in streamrl/run/monitoring/metric_names.py, or to the"
        " metrics of its extension"
    )
