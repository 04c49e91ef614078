"""Replay, audit and export of a run hold a window of it, however long it is."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.extensions.recordings.archive import export
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log import parquet, partitions_reader
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.parquet import FileLog
from streamrl.stream.log.protocol import Log, end_offset
from streamrl.stream.processor import joiner
from tests.support.data_path import RUN, TOPICS, announce, parts, running, send_groups
from tests.support.waiting import until

# batches, of 20 rollouts; by then the uids that the buffer remembers are as many as they ever are
SHORT = 50
LONG = 200


def recorded(directory: Path, batches: int) -> FileLog:
    """A run in files, and as much again that nobody has read."""
    log = MemoryLog(TOPICS)
    with running(log):
        for version in range(batches):
            announce(log, version)
            for env in RUN.envs:
                send_groups(log, env, range(version * 5, version * 5 + 5), version)
            # with its marker
            until(
                lambda version=version: end_offset(log, "batches", 0) >= 2 * (version + 1),
                60,
                f"batch {version} does not come",
                0.002,
            )
    for env in RUN.envs:
        send_groups(log, env, range(batches * 5, batches * 10), batches)
    return export(log, RUN, directory)


@pytest.fixture(scope="module", autouse=True)
def small_row_groups() -> Iterator[None]:
    """So small that the short run has many of them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_ROWS", 50)
        yield


@pytest.fixture(scope="module")
def runs(
    small_row_groups: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FileLog, FileLog]:
    """A short run and one four times as long."""
    directory = tmp_path_factory.mktemp("runs")
    return recorded(directory / "short", SHORT), recorded(directory / "long", LONG)


def replayed(log: Log) -> None:
    results = [replay(log, part)[0] for part in parts()]
    assert [result.difference for result in results] == ["", ""] and results[1].identical[
        "batches"
    ] >= SHORT


def audited(log: Log) -> None:
    result = audit(log, RUN)
    assert result.balanced and result.total("in flight") >= SHORT * 20


def exported(log: Log) -> None:
    with tempfile.TemporaryDirectory() as directory:
        export(log, RUN, Path(directory))


def peak_bytes(work: Callable[[Log], None], log: Log) -> int:
    """The most that the interpreter's objects took, above what there was."""
    tracemalloc.start()
    try:
        work(log)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("work", [replayed, audited, exported])
def test_memory_does_not_grow_with_the_run(
    runs: tuple[FileLog, FileLog], work: Callable[[Log], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partitions_reader, "FETCH_BYTES", 1)  # so one batch of messages is ahead
    monkeypatch.setattr(partitions_reader, "AHEAD_BYTES", 100_000)
    monkeypatch.setattr(joiner, "SPARE_BYTES", 100_000)
    monkeypatch.setattr(joiner, "FETCH_RECORDS", 20)
    monkeypatch.setattr("streamrl.extensions.recordings.replay.ENTRIES_AHEAD", 20)
    short, long = runs
    work(short)  # what is made once and kept: imports, caches
    before, after = (peak_bytes(work, FileLog(run.directory)) for run in (short, long))
    # four times as much would be 4; the rest are buffers that the short run does not fill
    assert after < 2 * before
