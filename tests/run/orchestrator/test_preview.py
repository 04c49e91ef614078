"""What `streamrl check` prints of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.orchestrator import preview as module
from streamrl.run.orchestrator.preview import (
    age_of_longest,
    cache_bytes,
    padding,
    parameter_count,
    preview,
)
from streamrl.system.errors import ModelError

QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1_024,
    "intermediate_size": 3_072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}


def run_of(**sections: Any) -> RunFile:
    return parse({"run": "r", "envs": {"copy-digits": {"fraction": 1.0}}, **sections})


def told(run: RunFile) -> dict[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for fact in preview(run):
        facts.setdefault(fact.subject, []).append(fact.text)
    return facts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    return tmp_path


def test_parameters_are_those_that_the_publishers_name():
    """596 million and 30.5 billion; norms and routers, 0.1 %, are not counted."""
    assert parameter_count(QWEN3_06B) == pytest.approx(596e6, rel=2e-3)
    assert parameter_count(QWEN3_30B) == pytest.approx(30.5e9, rel=2e-3)


def test_a_run_on_this_machine_is_told_in_full():
    facts = told(
        run_of(orchestrator={"max_steps": 20, "target": {"env": "copy-digits", "reward": 0.9}})
    )
    assert facts["model"] == ["a tiny Llama, made at the start: 2 layers of 128"]
    assert facts["parts"] == ["learner, inference-0, buffer, batcher, env-copy-digits-0"]
    assert facts["env"][0].startswith("copy-digits: copy-digits, 1 process; 100% of a batch")
    assert facts["ends"] == ["when copy-digits earns 0.9, or 20 steps are done"]
    assert facts["kafka"][0].startswith("a local broker") and "memory" not in facts


def test_memory_is_that_of_weights_gradients_and_moments(model: Path):
    """596 million parameters: 16 bytes each for the learner, 2 in bfloat16 for a server. A token of
    its cache is 2 x 28 layers x 8 heads x 128 values of 2 bytes: 9,362 in a GiB.
    """
    sequences = {"max_num_seqs": 64, "max_model_len": 1_024}
    facts = told(run_of(model={"path": str(model)}, inference={"dtype": "bfloat16", **sequences}))
    learner, server = facts["memory"]
    assert learner.startswith("learner: 8.9 GiB of weights, gradients and AdamW's moments")
    assert server.startswith("each server: 1.1 GiB of weights")
    assert server.endswith("9,362 tokens in a GiB (7.0 GiB for 64 sequences of full length)")
    assert cache_bytes(QWEN3_06B, "fp8") * 2 == cache_bytes(QWEN3_06B) == 114_688


def test_the_memory_of_a_step_is_computed_for_the_devices_of_the_learner(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without the compilation, which tests/learner/test_memory.py has."""
    asked = list[int]()

    def compiled(run: RunFile, config: Any, devices: int) -> float:
        asked.append(devices)
        return 12.0

    monkeypatch.setattr(module, "learner_gib", compiled)
    eight = {"nodes": ["a", "b"], "devices": [0, 1, 2, 3]}
    sections: dict[str, Any] = {
        "model": {"path": str(model)},
        "placement": {"learner": {**eight, "memory_fraction": 0.8}, "inference": {}},
    }
    run = run_of(**sections, learner={"processes": 2})
    facts = [fact.text for fact in preview(run, with_memory=True)]
    said = "12.0 GiB on each of 4 devices of a step; it reserves 80% of a GPU, which needs 15 GiB"
    assert f"learner: {said}" in facts
    preview(run_of(**sections, learner={"processes": 2, "mesh": {"nodes": "divide"}}), True)
    assert asked == [4, 8]


def test_long_answers_are_old_when_they_train():
    """4 servers of 100 sequences sample 100 tokens each while 10 batches of 4,000 are trained."""
    sections: dict[str, Any] = {
        "envs": {"copy-digits": {"fraction": 1.0, "max_tokens": 100}},
        "inference": {"replicas": 4, "max_num_seqs": 100},
        "batcher": {"total_token_budget": 4_000, "max_seq_len": 400, "row_count": 10},
    }
    run = run_of(**sections, buffer={"max_age": 10})
    assert age_of_longest(run) == 10 and padding(run) == 0
    assert told(run)["age"][0].endswith(
        "that of the longest answer is 10 when all servers are busy"
    )
    short = run_of(**sections, buffer={"max_age": 9})
    assert told(short)["age"][0].endswith("long answers expire; raise buffer.max_age")


def test_devices_of_a_machine_with_the_same_parts_are_in_one_line():
    placement = {
        "learner": {"nodes": ["a"], "devices": [0, 1], "memory_fraction": 0.8},
        "inference": {"nodes": ["b"], "devices": [0, 1, 2, 3]},
    }
    run = run_of(placement=placement, inference={"replicas": 2, "tensor_parallel": 2})
    assert told(run)["device"] == [
        "0, 1 of a: learner reserves 80%",
        "0, 1 of b: inference-0 reserves 90%",
        "2, 3 of b: inference-1 reserves 90%",
    ]


def test_each_device_has_the_parts_that_reserve_it(model: Path):
    facts = told(
        run_of(
            model={"path": str(model)},
            placement={
                "learner": {"devices": [0, 1], "memory_fraction": 0.5},
                "inference": {"devices": [1]},
            },
            inference={"engine": {"gpu_memory_utilization": 0.4}},
        )
    )
    assert facts["device"] == [
        "0: learner reserves 50%",
        "1: learner reserves 50%, inference-0 reserves 40%",
    ]
    assert "4.4 GiB on each of 2 devices" in facts["memory"][0]


def test_a_model_of_the_hub_that_is_not_here_yet_is_named():
    (model,) = told(run_of(model={"path": "Qwen/Qwen3-0.6B@0123456789abcdef"}))["model"]
    assert model.startswith("Qwen/Qwen3-0.6B") and "which `up` downloads" in model


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (None, "config.json cannot be read"),
        ("{", "is no config of a language model"),
        ('{"hidden_size": 8}', "is no config of a language model"),
    ],
)
def test_a_model_that_cannot_be_read_is_an_error(written: str | None, reason: str, tmp_path: Path):
    if written is not None:
        (tmp_path / "config.json").write_text(written)
    with pytest.raises(ModelError, match=reason):
        preview(run_of(model={"path": str(tmp_path)}))


def test_a_model_directory_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(ModelError, match="gone/model does not exist; give a Hugging Face"):
        preview(run_of(model={"path": f"{tmp_path}/gone/model"}))


def test_runs_that_share_servers_and_the_keys_that_they_sample_with():
    host = {"api_key": "env:OWN", "also_serves": {"second": {"api_key": "env:SECOND"}}}
    lora = {"learner": {"lora": {}}}
    assert told(run_of(inference=host, **lora))["sharing"] == [
        "the servers also serve run second, which samples with its own key, env:SECOND"
    ]
    guest = {"api_key": "env:SECOND", "served_by": ["first"], "replicas": 0}
    assert told(run_of(inference=guest, **lora))["sharing"] == [
        "servers of run first also serve this one, which samples there with env:SECOND; user"
        " first.inference may read policy-versions and write servers and metrics"
    ]
    assert "sharing" not in told(run_of())
