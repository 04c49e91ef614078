from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from bench import gpu
from bench.budgets import MODELS
from streamrl.learner.model import attention
from streamrl.learner.model.attention import Heads


def test_a_kernel_has_its_time_and_its_distance_or_the_reason_why_not(
    monkeypatch: pytest.MonkeyPatch,
):
    def leaky(q: Any, k: Any, v: Any, segment_ids: Any, scale: float) -> jax.Array:
        return attention.reference(q, k, v, jax.numpy.ones_like(segment_ids), scale)

    monkeypatch.setattr(gpu, "HEADS", Heads(1, 2, 16, "bfloat16", 0.25))
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setitem(attention.KERNELS, "pallas", leaky)
    cudnn, pallas, reference = gpu.kernels(tokens=64)
    assert cudnn.startswith("attention cudnn\tcannot be computed: ")
    assert pallas.startswith("attention pallas\t") and "SEGMENTS SEE EACH OTHER" in pallas
    assert reference.endswith("ms a row, off by 0, segments apart")


def test_the_learner_is_next_to_levanter_alone(tmp_path: Path):
    shape = {
        "model": "smollm2-135m-instruct",
        "tokens_per_s": {"learner": 190_000.4, "levanter": 200_000.0},
        "ratio_of_turns": {"median": 0.95},
    }
    (tmp_path / "learner.json").write_text(json.dumps({"shapes": [shape]}))
    assert [*gpu.learner(tmp_path / "learner.json")] == [
        "learner, smollm2-135m-instruct\t190,000 tokens/s",
        "Levanter alone, smollm2-135m-instruct\t200,000 tokens/s",
        "ratio\t0.950",
    ]


def test_a_run_has_its_rate_its_mfu_and_its_pauses(tmp_path: Path):
    """595.8 million parameters at 100,000 tokens/s: 357.5 of 989 TFLOPS. The first three steps
    compile and do not count.
    """
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-0.6b"]))
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path}}}")
    rates = [10, 20, 30, 90_000, 100_000, 110_000]
    lines = [
        {"values": {"learner/step_s": 1.0, "learner/tokens_per_s": rate}} for rate in rates
    ] + [
        {"values": {"inference/swap_s": 0.25, "inference/mismatch_mean_abs": 0.02}},
        {"values": {"buffer/groups": 1}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evals = {"sums": [{"version": 0, "pass@1": [0.05]}, {"version": 40, "pass@1": [0.6841]}]}
    (tmp_path / "report.json").write_text(json.dumps({"evals": evals}))
    name = tmp_path.name
    assert [*gpu.run(tmp_path, 989)] == [
        f"{name}: steps\t6",
        f"{name}: within a step\t100,000 tokens/s",
        f"{name}: MFU, 6 FLOPs a parameter\t36.2% of 989 TFLOPS",
        f"{name}: a swap's pause\t250 ms",
        f"{name}: server and learner apart\t0.02, mean of a probe's tokens",
        f"{name}: held-out pass@1 of sums, by version\t0.050, 0.684",
    ]
