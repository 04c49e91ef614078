from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from streamrl.learner.files.tensor_files import write_tensors


def test_files_are_those_that_the_library_writes(tmp_path: Path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b.c": np.float32([7]),
        "one": np.array(5, np.float32),
        "transposed": np.arange(4, dtype=np.float32).reshape(2, 2).T,
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours", shapes, tensors.__getitem__)
    save_file(
        {name: np.array(tensor, order="C") for name, tensor in tensors.items()},
        tmp_path / "theirs",
        metadata={"format": "pt"},
    )
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
