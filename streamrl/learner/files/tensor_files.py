"""safetensors files, written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

ITEM_BYTES = 4  # A policy is trained in float32, and written so.


def write_tensors(
    path: Path, shapes: Mapping[str, Sequence[int]], tensor_of: Callable[[str], np.ndarray]
) -> None:
    """Write a safetensors file with the bytes that `safetensors.numpy.save_file` would write. That
    function wants all tensors at once, and copies every one to a bytes object, which would be a
    second copy of the whole model in memory. Raises OSError.

    `shapes`: of the tensors, in the order in which they are written. `tensor_of`: gives each of
    them in float32 when its turn comes.
    """
    described = dict[str, Any]({"__metadata__": {"format": "pt"}})
    end = 0
    for name, shape in shapes.items():
        start = end
        end = end + prod(shape) * ITEM_BYTES
        described[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in shapes:
            file.write(np.ascontiguousarray(tensor_of(name)).data)
