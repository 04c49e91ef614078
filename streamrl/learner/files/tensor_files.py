"""safetensors files, written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {FLOAT32: "F32", BFLOAT16: "BF16"}  # of data types in a safetensors file


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    tensor_of: Callable[[str], np.ndarray],
    dtype: np.dtype[Any] = FLOAT32,
) -> None:
    """Write a safetensors file with the bytes that `safetensors.numpy.save_file` would write. That
    function wants all tensors at once, and copies every one to a bytes object, which would be a
    second copy of the whole model in memory. Raises OSError.

    `shapes`: of the tensors, in the order in which they are written. `tensor_of`: gives each of
    them when its turn comes. `dtype`: of all of them, float32 or bfloat16.
    """
    described = dict[str, Any]({"__metadata__": {"format": "pt"}})
    end = 0
    for name, shape in shapes.items():
        start = end
        end = end + prod(shape) * dtype.itemsize
        described[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in shapes:
            # numpy cannot show bfloat16 as a buffer.
            file.write(np.ascontiguousarray(tensor_of(name)).view(np.uint8).data)
