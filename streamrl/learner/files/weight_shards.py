"""How several processes of a learner write one model without gathering it. Each process copies the
shards on its own devices and writes some of the model's files. Processes exchange the shards of
each other's files in a directory that all see (`staging.py`), so that no process ever holds more
than its own shards and the tensor that it is writing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import safe_open

from streamrl.learner.files.tensor_files import write_tensors
from streamrl.weights.files import parallel_map

Bounds = tuple[tuple[int, int], ...]  # where a shard begins and ends, along each axis


class TensorShard(NamedTuple):
    """A part of a tensor, and the process that copies it."""

    bounds: Bounds
    holder: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this part in the tensor."""
        return tuple(slice(*ends) for ends in self.bounds)


def shards_of(tensor: jax.Array, writer: int) -> list[TensorShard]:
    """The shards that a tensor consists of, each once, in their order in the tensor. Of several
    processes with the same shard, the one that writes the tensor copies it, or else the first.
    """
    processes: dict[Bounds, set[int]] = {}
    for device, index in tensor.sharding.devices_indices_map(tensor.shape).items():
        bounds = bounds_of(index, tensor.shape)
        processes.setdefault(bounds, set()).add(device.process_index)
    return [
        TensorShard(bounds, writer if writer in having else min(having))
        for bounds, having in sorted(processes.items())
    ]


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """The bounds of an index as JAX gives it, which may leave out where an axis ends."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


class LocalWeights(NamedTuple):
    """Weights to be written, of which this process has copied its shards."""

    dtype: np.dtype[Any]  # of all tensors
    process: int
    processes: int
    files: Mapping[str, Sequence[str]]  # the names of the tensors in each file
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors
    shards: Mapping[str, Sequence[TensorShard]]  # of all tensors
    copies: Mapping[tuple[str, int], np.ndarray]  # this process's, by tensor and number of shard

    @property
    def size_bytes(self) -> int:
        """The size of all tensors together."""
        return sum(prod(shape) * self.dtype.itemsize for shape in self.shapes.values())

    def files_of(self, process: int) -> list[str]:
        """The files that a process writes: every n-th of them."""
        return list(self.files)[process :: self.processes]

    def holders_for(self, process: int) -> list[int]:
        """The other processes with shards of the files of a process."""
        holders = {holder for file in self.files_of(process) for holder in self._holders(file)}
        return sorted(holders - {process})

    def _holders(self, file: str) -> set[int]:
        return {shard.holder for name in self.files[file] for shard in self.shards[name]}

    def write_shards(self, directory: Path) -> None:
        """Write this process's shards of the others' files. Raises OSError."""
        others = (other for other in range(self.processes) if other != self.process)
        for file in (file for other in others for file in self.files_of(other)):
            copies = {
                key(name, number): self.copies[name, number]
                for name in self.files[file]
                for number, shard in enumerate(self.shards[name])
                if shard.holder == self.process
            }
            if copies:
                directory.mkdir(parents=True, exist_ok=True)
                shapes = {name: copy.shape for name, copy in copies.items()}
                path = directory / shard_file(self.process, file)
                write_tensors(path, shapes, copies.__getitem__, self.dtype)

    def write_files(self, directory: Path, shards: Path) -> None:
        """Write this process's files of the model. `shards`: the directory with the shards that
        the other processes have written. Raises OSError.
        """
        directory.mkdir(parents=True, exist_ok=True)
        parallel_map(
            lambda file: self._write_file(file, directory, shards), self.files_of(self.process)
        )

    def _write_file(self, file: str, directory: Path, shards: Path) -> None:
        shapes = {name: self.shapes[name] for name in self.files[file]}
        with ExitStack() as opened:
            from_others = {
                holder: opened.enter_context(safe_open(shards / shard_file(holder, file), "np"))
                for holder in self._holders(file) - {self.process}
            }
            write_tensors(
                directory / file, shapes, lambda name: self._whole(name, from_others), self.dtype
            )

    def _whole(self, name: str, from_others: Mapping[int, Any]) -> np.ndarray:
        """A whole tensor. `from_others`: an open file of each other process with shards of it."""
        shards = self.shards[name]
        if len(shards) == 1 and shards[0].holder == self.process:
            return self.copies[name, 0]
        whole = np.empty(self.shapes[name], self.dtype)
        for number, shard in enumerate(shards):
            if shard.holder == self.process:
                whole[shard.slices] = self.copies[name, number]
            else:
                whole[shard.slices] = from_others[shard.holder].get_tensor(key(name, number))
        return whole


def local_weights(
    tensors: Mapping[str, jax.Array],
    files: Mapping[str, Sequence[str]],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> LocalWeights:
    """Copy this process's shards of some tensors off its devices, all at the same time.

    `tensors`: all of one data type. `files`: the names of the tensors in each file. `sources`: the
    tensors that are written under another name than they have.
    """
    process = jax.process_index()
    processes = jax.process_count()
    shards = dict[str, list[TensorShard]]()
    on_devices = dict[tuple[str, Bounds], Any]()
    places = dict[tuple[str, int], tuple[str, Bounds]]()
    for position, names in enumerate(files.values()):
        for name in names:
            source = sources.get(name, name)
            tensor = tensors[source]
            shards[name] = shards_of(tensor, position % processes)
            own = {
                bounds_of(shard.index, tensor.shape): shard.data
                for shard in tensor.addressable_shards
            }
            for number, shard in enumerate(shards[name]):
                if shard.holder == process:
                    places[name, number] = (source, shard.bounds)
                    on_devices[source, shard.bounds] = own[shard.bounds]
    # All copies begin before the first is waited for.
    copied = jax.device_get(on_devices)
    (dtype,) = {np.dtype(tensor.dtype) for tensor in tensors.values()}
    return LocalWeights(
        dtype=dtype,
        process=process,
        processes=processes,
        files=files,
        shapes={name: tensors[sources.get(name, name)].shape for name in shards},
        shards=shards,
        copies={key: copied[place] for key, place in places.items()},
    )


def shard_file(holder: int, file: str) -> str:
    """The file with a process's shards of another process's file."""
    return f"{holder}-{file}"


def key(name: str, number: int) -> str:
    """The name of a tensor's shard in such a file."""
    return f"{name}:{number}"
