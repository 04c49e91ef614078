"""What one process writes of a version. Several processes are in test_staging.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from streamrl.config.run_file import parse
from streamrl.learner.trainer import open_trainer
from streamrl.weights.store import Store


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_has_the_same_hash_in_memory_and_in_the_store(
    dtype: str, tiny: Path, tmp_path: Path
):
    run = parse(
        {
            "run": "small",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
            "batcher": {"total_token_budget": 24, "max_seq_len": 16, "row_count": 2},
            "model": {"path": str(tiny), "max_seq_len": 16},
            "inference": {"dtype": dtype},
        }
    )
    with open_trainer(run) as policy:
        alone = policy.snapshot()
        staged = policy.snapshot(tmp_path / "checkpoints")
        sha256 = policy.sha256()
    staged.exchange_shards()
    result = staged.put_into_store(Store(f"file://{tmp_path}/store"))
    assert alone.sha256() == staged.sha256() == result.stored.sha256 == sha256
    assert result.stored.size_bytes >= alone.weights.size_bytes
    alone.write_model(tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype.name for tensor in found.values()} == {dtype}
