"""The processes of a learner are threads here, and find each other through a dict, but for the last
test, which has two real ones.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from streamrl.errors import WeightError
from streamrl.learner import distributed, export, model
from streamrl.learner.mesh import use_mesh
from streamrl.learner.staging import StagedFiles, staging_directory
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


def staged_in(directory: Path, files: list[str] = FILES) -> StagedFiles:
    return StagedFiles(directory / ".tmp-v000001-ab", files)


def write_own(directory: Path) -> None:
    """This process's files, each with its name."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in export.files_of_process(FILES, jax.process_index(), 3):
        (directory / name).write_text(name)


@pytest.mark.parametrize("links", [True, False])
def test_rank_zero_has_the_files_of_all(
    processes: Callable[[Callable[[int], None]], list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    links: bool,
):
    """It may collect them twice: to hash them, and to put them into the store."""
    staged = staged_in(tmp_path)

    def refuse(source: Path, target: Path) -> None:
        raise OSError("another file system")

    if not links:
        monkeypatch.setattr(os, "link", refuse)

    def work(process: int) -> None:
        if process:
            staged.hand_over(write_own)
            return
        for name in ("one", "two"):
            write_own(tmp_path / name)
            staged.collect(tmp_path / name)

    assert processes(work) == [None, None, None]
    for name in ("one", "two"):
        found = {path.name: path.read_text() for path in (tmp_path / name).iterdir()}
        assert found == dict(zip(FILES, FILES, strict=True))
    assert (tmp_path / "one" / FILES[1]).stat().st_nlink == (3 if links else 1)
    staged.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_when_rank_zero_has_written_all_have(
    processes: Callable[[Callable[[int], None]], list[object]], tmp_path: Path
):
    """A reference goes into a checkpoint so, and may go into the next one, too."""
    seen = list[list[str]]()

    def work(process: int) -> None:
        for checkpoint in ("000002", "000003"):
            staged_in(tmp_path / checkpoint).write(write_own)
            if process == 0:
                written = (tmp_path / checkpoint / ".tmp-v000001-ab").iterdir()
                seen.append(sorted(path.name for path in written))

    assert processes(work) == [None, None, None] and seen == [FILES, FILES]


def test_a_process_without_files_does_nothing(
    processes: Callable[[Callable[[int], None]], list[object]], tmp_path: Path
):
    staged = staged_in(tmp_path, FILES[:1])

    def work(process: int) -> None:
        if process:
            staged.hand_over(write_own)
        else:
            staged.collect(tmp_path)

    assert processes(work) == [None, None, None] and not list(tmp_path.iterdir())


def test_what_one_process_could_not_write_is_said_by_both(
    processes: Callable[[Callable[[int], None]], list[object]], tmp_path: Path
):
    (tmp_path / "file").touch()
    staged = staged_in(tmp_path / "file")

    def work(process: int) -> None:
        if process == 1:
            staged.hand_over(write_own)
        elif process == 0:
            staged.collect(tmp_path)

    zero, one, two = processes(work)
    assert two is None and isinstance(zero, WeightError) and isinstance(one, WeightError)
    assert str(zero) == str(one)
    assert "/.tmp-v000001-ab cannot be written (" in str(zero) and "free some space" in str(zero)


def test_a_process_that_reports_nothing_is_named(
    processes: Callable[[Callable[[int], None]], list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("streamrl.learner.staging.WRITE_TIMEOUT_S", 0.01)

    def work(process: int) -> None:
        if process == 0:
            staged_in(tmp_path).collect(tmp_path)

    zero = processes(work)[0]
    assert isinstance(zero, WeightError)
    assert str(zero) == (
        f"process 1 of the learner did not write its files of {tmp_path.name}/.tmp-v000001-ab"
        " within 0.01 s (DEADLINE_EXCEEDED); its own log says more"
    )


def test_the_directory_is_one_that_a_learner_clears_at_its_start(tmp_path: Path):
    directory = staging_directory(tmp_path, version=12)
    assert directory.parent == tmp_path and directory.name.startswith(".tmp-v000012-")


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
        export.save_local(weights, tiny, tmp_path / "one")
    one = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert one == {path.name: path.read_bytes() for path in (tmp_path / "0").iterdir()}

    held = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert [found["own"] for found in held] == [weights.own_files[i::2] for i in range(2)]
    assert sum(found["tensors"] for found in held) == len(weights.tensors)
    for found in held:
        assert found["held"] <= found["tensors"] + 2  # one that comes, and the one before it
        assert found["bytes"] < 0.7 * weights.size_bytes
    assert not list(tmp_path.glob(".tmp-*"))
