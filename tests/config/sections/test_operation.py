from __future__ import annotations

from streamrl.config.sections.operation import Orchestrator, SinkSetting, Topics


def test_a_sink_without_params_is_given_by_its_name():
    given = ["jsonl", {"kind": "wandb", "params": {"project": "digits"}}]
    assert Orchestrator.model_validate({"sinks": given}).sinks == [
        SinkSetting(kind="jsonl"),
        SinkSetting(kind="wandb", params={"project": "digits"}),
    ]


def test_a_snapshot_is_much_younger_than_the_retention():
    assert Topics(retention_hours=8).snapshot_s == 3_600
