"""The tensors are on one device here, and are taken for sharded over several processes. The last
test of test_staging.py has real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from streamrl.learner.files.weight_shards import LocalWeights, TensorShard, local_weights, shards_of

FILES = {"one": ["a", "b"], "two": ["c"], "three": ["d", "head"]}
HEAD = {"head": "a"}
EVERYTHING = slice(None)
Sharding = Callable[[int], tuple[slice, ...]]  # which part of a matrix a process has


class Device(NamedTuple):
    number: int
    process_index: int


def rows(process: int) -> tuple[slice, ...]:
    return slice(2 * process, 2 * process + 2), EVERYTHING


def columns(process: int) -> tuple[slice, ...]:
    return EVERYTHING, slice(process, process + 1)


def replicated(process: int) -> tuple[slice, ...]:
    return EVERYTHING, EVERYTHING


def one_pair(process: int) -> tuple[slice, ...]:
    """Two halves of the rows; the third process has the first one, too."""
    return slice(3 * (process % 2), 3 * (process % 2) + 3), EVERYTHING


def tensor(whole: np.ndarray, process: int, sharding: Sharding, processes: int = 3) -> Any:
    """A matrix that processes of one device each hold, as one of them sees it."""
    held = {Device(7 + number, number): sharding(number) for number in range(processes)}
    own = sharding(process)
    return SimpleNamespace(
        shape=whole.shape,
        dtype=whole.dtype,
        sharding=SimpleNamespace(devices_indices_map=lambda shape: held),
        addressable_shards=[SimpleNamespace(index=own, data=whole[own])],
    )


def matrices() -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    return {name: draws.normal(size=(6, 3)).astype(np.float32) for name in "abcd"}


def held_by(process: int, monkeypatch: pytest.MonkeyPatch) -> LocalWeights:
    """`a` and the head are sharded by rows, `b` is replicated, `c` is sharded by columns, and `d`
    is on two of three processes twice.
    """
    shardings = {"a": rows, "b": replicated, "c": columns, "d": one_pair}
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    seen = {name: tensor(whole, process, shardings[name]) for name, whole in matrices().items()}
    return local_weights(seen, FILES, HEAD)


def test_each_part_is_copied_once_and_by_who_writes_it_if_it_has_it():
    whole = np.zeros((6, 3), np.float32)
    assert [shard.holder for shard in shards_of(tensor(whole, 0, rows), 1)] == [0, 1, 2]
    assert shards_of(tensor(whole, 0, replicated), 2) == [TensorShard(((0, 6), (0, 3)), 2)]
    first, second = shards_of(tensor(whole, 0, one_pair), 2)
    assert first == TensorShard(((0, 3), (0, 3)), 2) and second.holder == 1
    first, second = shards_of(tensor(whole, 0, one_pair), 1)
    assert first.holder == 0 and second.holder == 1


def test_the_files_of_all_processes_have_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = [held_by(process, monkeypatch) for process in range(3)]
    for each in weights:
        each.write_shards(tmp_path / "shards")
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [
        "0-three",
        "0-two",
        "1-one",
        "1-three",
        "2-one",
        "2-two",
    ]
    for each in weights:
        each.write_files(tmp_path / "model", tmp_path / "shards")
    expected = matrices() | {"head": matrices()["a"]}
    for file, names in FILES.items():
        found = load_file(tmp_path / "model" / file)
        assert sorted(found) == names
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_a_process_holds_its_shards_and_waits_for_who_has_the_others(
    monkeypatch: pytest.MonkeyPatch,
):
    zero, one, two = (held_by(process, monkeypatch) for process in range(3))
    assert zero.size_bytes == one.size_bytes == 5 * 6 * 3 * 4
    assert [zero.files_of(process) for process in range(3)] == [["one"], ["two"], ["three"]]
    assert [one.holders_for(process) for process in range(3)] == [[1, 2], [0, 2], [0, 1]]
    held = [{name for name, _ in each.copies} for each in (zero, one, two)]
    assert held == [{"a", "b", "c", "head"}, {"a", "c", "d", "head"}, {"a", "c", "d", "head"}]
    # the head's copy is the embedding's
    assert zero.copies["head", 0] is zero.copies["a", 0]
    assert zero.copies["c", 0].shape == (6, 1)


def test_nothing_is_handed_over_if_every_process_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        seen = {name: tensor(whole, process, replicated, 2) for name, whole in matrices().items()}
        weights = local_weights(seen, FILES, HEAD)
        assert [weights.holders_for(each) for each in range(2)] == [[], []]
        weights.write_shards(tmp_path / "shards")
        weights.write_files(tmp_path / "model", tmp_path / "shards")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(FILES)


def test_bfloat16_is_exchanged_and_written_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    whole = np.arange(18).reshape(6, 3).astype(ml_dtypes.bfloat16)
    weights = list[LocalWeights]()
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        weights.append(local_weights({"a": tensor(whole, process, rows)}, {"one": ["a"]}))
        weights[-1].write_shards(tmp_path / "shards")
    weights[0].write_files(tmp_path, tmp_path / "shards")
    found = load_file(tmp_path / "one")["a"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, whole)
    assert weights[0].size_bytes == found.nbytes == 36
