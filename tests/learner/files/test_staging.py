"""The processes of a learner are threads here, and find each other through a dict, but for the last
test, which has two real ones.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from streamrl.learner.files import export
from streamrl.learner.files.staging import StagedFiles, shards_beside, staging_directory
from streamrl.learner.files.weight_shards import LocalWeights, TensorShard
from streamrl.learner.model import model
from streamrl.learner.parallel import distributed
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system.errors import WeightError
from tests.learner.conftest import CONTEXT
from tests.learner.devices import run_on_two_by_four
from tests.support.waiting import patience

FILES = [f"model-{i}" for i in range(5)]


class Reports:
    """Stands in for JAX's service."""

    def __init__(self) -> None:
        self._reports = dict[str, str]()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert self._reports.setdefault(key, value) is value, "reported twice"
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._changed:
            there = self._changed.wait_for(lambda: key in self._reports, timeout_ms / 1_000)
        if not there:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self._reports[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in [name for name in self._reports if name.startswith(f"{key}/")]:
                del self._reports[name]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], list[object]]:
    """Runs a function in three processes at once. Returns what each raised."""
    reports = Reports()
    here = threading.local()
    monkeypatch.setattr(distributed, "_client", lambda: reports)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: here.process)

    def run(work: Callable[[int], None]) -> list[object]:
        def of(process: int) -> object:
            here.process = process
            try:
                work(process)
            except (WeightError, OSError) as error:
                return error
            return None

        with ThreadPoolExecutor(3) as threads:
            return [*threads.map(of, range(3), timeout=patience(30.0))]

    return run


def staged_in(directory: Path, files: int = 5, at: str = ".tmp-v000001-ab") -> StagedFiles:
    """Files with one tensor each, as this process has them: a number that the first process has,
    and a second one that the last process has.
    """
    process = jax.process_index()
    names = FILES[:files]
    numbers = {0: 0, 2: 1}
    weights = LocalWeights(
        dtype=np.dtype(np.float32),
        process=process,
        processes=3,
        files={name: [f"tensor-{name}"] for name in names},
        shapes={f"tensor-{name}": (2,) for name in names},
        shards={
            f"tensor-{name}": [TensorShard(((0, 1),), 0), TensorShard(((1, 2),), 2)]
            for name in names
        },
        copies={
            (f"tensor-{name}", numbers[process]): np.array([10 * i + process], np.float32)
            for i, name in enumerate(names)
            if process in numbers
        },
    )
    return StagedFiles(directory / at, weights)


def numbers_in(directory: Path) -> list[list[float]]:
    """The tensor of each file in a directory. There is nothing else."""
    return [load_file(path)[f"tensor-{path.name}"].tolist() for path in sorted(directory.iterdir())]


EXPECTED = [[10 * i, 10 * i + 2] for i in range(5)]


@pytest.mark.parametrize("links", [True, False])
def test_rank_zero_has_the_files_of_all(
    processes: Callable[[Callable[[int], None]], list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    links: bool,
):
    """It may gather them twice: to hash them, and to put them into the store."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError("another file system")

    if not links:
        monkeypatch.setattr(os, "link", refuse)

    def work(process: int) -> None:
        staged = staged_in(tmp_path)
        if process:
            staged.stage_own_files()
            return
        staged.exchange_shards()
        for name in ("one", "two"):
            staged.weights.write_files(tmp_path / name, staged.shards)
            staged.gather_files(tmp_path / name)
            seen.append((tmp_path / name / FILES[1]).stat().st_nlink)
        staged.remove()

    seen = list[int]()
    assert processes(work) == [None, None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert numbers_in(tmp_path / "one") == numbers_in(tmp_path / "two") == EXPECTED
    assert seen == ([2, 3] if links else [1, 1])


def test_when_rank_zero_has_written_all_have(
    processes: Callable[[Callable[[int], None]], list[object]], tmp_path: Path
):
    """A reference goes into a checkpoint so, and may go into the next one, too. The same names may
    come again after a restart from an earlier version.
    """
    seen = list[list[list[float]]]()

    def work(process: int) -> None:
        for checkpoint in ("000002", "000003"):
            staged_in(tmp_path / checkpoint, at="reference").write_all_files()
            if process == 0:
                seen.append(numbers_in(tmp_path / checkpoint / "reference"))

    assert processes(work) == [None, None, None] and seen == [EXPECTED, EXPECTED]
    assert [path.name for path in (tmp_path / "000002").iterdir()] == ["reference"]


def test_a_process_without_files_hands_over_its_shards(
    processes: Callable[[Callable[[int], None]], list[object]], tmp_path: Path
):
    def work(process: int) -> None:
        staged_in(tmp_path, files=1, at="model").write_all_files()

    assert processes(work) == [None, None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert numbers_in(tmp_path / "model") == EXPECTED[:1]


@pytest.mark.parametrize(
    ("raised", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "; free some space in"),
        (MemoryError("no 3 GB"), "(MemoryError: no 3 GB)"),
    ],
)
@pytest.mark.parametrize("failing", ["write_files", "write_shards"])
def test_what_one_process_could_not_write_is_said_by_all_that_wait_for_it(
    processes: Callable[[Callable[[int], None]], list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    raised: Exception,
    hint: str,
):
    """The last process has shards for both of the others."""
    write = getattr(LocalWeights, failing)

    def on_a_bad_day(weights: LocalWeights, *directories: Path) -> None:
        if weights.process == 2:
            raise raised
        write(weights, *directories)

    monkeypatch.setattr(LocalWeights, failing, on_a_bad_day)
    zero, one, two = processes(lambda _: staged_in(tmp_path, at="model").write_all_files())
    assert isinstance(two, WeightError) and str(zero) == str(two)
    assert "/model cannot be written (" in str(two) and hint in str(two)
    assert str(one) == str(two) if failing == "write_shards" else one is None


def test_a_process_that_reports_nothing_is_named(
    processes: Callable[[Callable[[int], None]], list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("streamrl.learner.files.staging.WRITE_TIMEOUT_S", 0.01)

    def work(process: int) -> None:
        if process == 0:
            staged_in(tmp_path).exchange_shards()

    zero = processes(work)[0]
    assert isinstance(zero, WeightError)
    assert str(zero) == (
        f"process 2 of the learner did not write its part of {tmp_path.name}/.tmp-v000001-ab/shards"
        " within 0.01 s (DEADLINE_EXCEEDED); see its log"
    )


def test_the_directories_are_some_that_a_learner_clears_at_its_start(tmp_path: Path):
    directory = staging_directory(tmp_path, version=12)
    assert directory.parent == tmp_path and directory.name.startswith(".tmp-v000012-")
    assert shards_beside(directory).name.startswith(".tmp-")


@pytest.mark.slow
def test_two_processes_write_the_files_of_one_and_each_holds_its_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file_bytes = 10_000
    run_on_two_by_four(
        "tests.learner.exports",
        lambda coordinator, number: [tiny, tmp_path, str(file_bytes), coordinator, str(number)],
        tmp_path,
    )
    monkeypatch.setattr(export, "SHARD_BYTES", file_bytes)
    with use_mesh():
        weights = export.local_weights(model.load(tiny, CONTEXT))
        export.save_settings(weights, tiny, tmp_path / "one")
        weights.write_files(tmp_path / "one", tmp_path)
    one = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert one == {path.name: path.read_bytes() for path in (tmp_path / "0").iterdir()}

    held = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    files = list(weights.files)
    assert [found["files"] for found in held] == [files[0::2], files[1::2]]
    assert sum(found["bytes"] for found in held) == weights.size_bytes
    assert max(found["bytes"] for found in held) < 0.6 * weights.size_bytes
    handed_over = {name.split("-")[0] for name in held[0]["handed_over"]}
    assert handed_over == {"0", "1"}
    assert not list(tmp_path.glob(".tmp-*"))
