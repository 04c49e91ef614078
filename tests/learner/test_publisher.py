"""What goes on beside the next step, stopped where it matters: nothing here depends on how fast
anything is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoints import PendingCheckpoint
from streamrl.learner.files.staging import StagedFiles
from streamrl.learner.inputs import TrainingInput
from streamrl.learner.publisher import VersionPublisher
from streamrl.learner.start import newest_checkpoint
from streamrl.learner.trainer import (
    PolicyTrainer,
    checkpoint_directory,
    copies_of,
    open_trainer,
)
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Message, Offsets, Writer
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.system.errors import CheckpointError, Fenced, WeightError
from streamrl.weights.manifest import WeightRef
from streamrl.weights.pull import pull
from streamrl.weights.store import Store
from tests.learner.test_process import PATIENCE_S, a_log, batch, metrics, run_of, versions
from tests.support.waiting import until


class Gate:
    """What comes to it waits until it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        assert self._open.wait(PATIENCE_S)


class GatedStore(Store):
    def __init__(self, root: str, gate: Gate) -> None:
        super().__init__(root)
        self._gate = gate

    def put(self, version: int, write: Callable[[Path], object], size_bytes: int = 0) -> WeightRef:
        self._gate()
        return super().put(version, write, size_bytes)


class FullStore(Store):
    """For version 1."""

    def put(self, version: int, write: Callable[[Path], object], size_bytes: int = 0) -> WeightRef:
        if version == 1:
            raise WeightError("the weight store is full: v000001")
        return super().put(version, write, size_bytes)


class GatedWriter:
    def __init__(self, writer: Writer, gate: Gate) -> None:
        self._writer = writer
        self._gate = gate

    def commit(self, messages: Sequence[Message]) -> int:
        self._gate()
        return self._writer.commit(messages)

    def commit_offsets(self, positions: Offsets, wait: bool = True) -> bool:
        return self._writer.commit_offsets(positions, wait)

    def close(self) -> None: ...


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> RunFile:
    return with_overrides(
        run_of(tmp_path, tiny),
        ["learner.checkpoint_every=1", "learner.keep_checkpoints=9", "weights.keep_versions=9"],
    )


@pytest.fixture
def policy(run: RunFile) -> Iterator[PolicyTrainer]:
    with open_trainer(run) as made:
        yield made


@pytest.fixture
def log() -> MemoryLog:
    return a_log()


def made(policy: PolicyTrainer, log: MemoryLog, writer: Writer | None = None) -> VersionPublisher:
    return VersionPublisher(
        "lead", policy, {}, writer or log.writer("learner-lead"), Meter(log, "learner-lead")
    )


def taken(number: int) -> TrainingInput:
    return TrainingInput(batch(number), number + 1)


def until_it_fails(publisher: VersionPublisher) -> None:
    """Look for batches, of which there are none."""

    def nothing() -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            yield None
            time.sleep(0.01)

    for _ in publisher.until_failure(nothing()):
        pass


def test_what_is_announced_is_the_policy_before_the_next_step(
    policy: PolicyTrainer, log: MemoryLog, run: RunFile, tmp_path: Path
):
    gate = Gate()
    with made(policy, log) as publisher:
        publisher.store = GatedStore(f"{run.store}/lead", gate)
        policy.step(taken(0))
        wanted = policy.sha256()
        probe = policy.probe()
        publisher.publish(0)
        policy.step(taken(1))  # it takes the memory of the one before for its own
        assert policy.version == 2 and versions(log) == []
        gate.open()
        publisher.wait()
    (record,) = versions(log)
    assert (record.version, record.batch, record.sha256) == (
        1,
        0,
        wanted,
    ) and policy.sha256() != wanted
    assert record.probe is not None and record.probe.logprobs.tobytes() == probe.logprobs.tobytes()
    assert np.array_equal(record.probe.tokens, probe.tokens) and record.vocab_size == 16
    pull(record, run.store, tmp_path / "copy")
    assert log.committed_offsets("learner-lead") == {("batches", 0): 1}  # batch 1 is not dealt with


def test_a_process_that_was_taken_for_dead_completes_no_checkpoint(
    policy: PolicyTrainer, log: MemoryLog
):
    writer = RetryingWriter(log, "learner-lead", "policy-versions")
    publisher = made(policy, log, writer)
    publisher.check_rival = writer.check_rival
    publisher.publish(None, checkpoint=False)
    publisher.wait()
    RetryingWriter(log, "learner-lead", "policy-versions")
    with pytest.raises(Fenced, match="another process"):
        publisher.save_last_checkpoint()
    assert checkpoints.versions(publisher.checkpoints) == []


def test_at_its_end_all_is_announced_in_order(policy: PolicyTrainer, log: MemoryLog, run: RunFile):
    with made(policy, log) as publisher:
        for number in range(3):
            publisher.train(taken(number), idle_s=0.5)
    assert [(record.version, record.batch) for record in versions(log)] == [(1, 0), (2, 1), (3, 2)]
    assert [(metric.step, metric.values["learner/idle_s"]) for metric in metrics(log)] == [
        (0, 0.5),
        (1, 0.5),
        (2, 0.5),
    ]
    assert all(
        metric.values["learner/publish_wait_s"] <= metric.values["learner/publish_s"]
        for metric in metrics(log)
    )
    assert log.committed_offsets("learner-lead") == {("batches", 0): 3}
    found = [checkpoints.latest(publisher.checkpoints, version) for version in (1, 2, 3)]
    assert found == [
        checkpoints.TrainingPosition(record.version, record.version, record.sha256)
        for record in versions(log)
    ]


def test_a_state_is_no_checkpoint_before_its_version_is_announced(
    policy: PolicyTrainer, log: MemoryLog
):
    gate = Gate()
    with made(policy, log, GatedWriter(log.writer("learner-lead"), gate)) as publisher:
        publisher.train(taken(0), idle_s=0.0)
        assert checkpoints.versions(publisher.checkpoints) == [] and metrics(log) == []
        gate.open()
        publisher.wait()
        assert (
            checkpoints.versions(publisher.checkpoints) == [1]
            and metrics(log)[0].values["learner/checkpoint_s"] > 0
        )


def test_a_process_that_does_not_write_hands_over_its_files_and_announces_nothing(
    policy: PolicyTrainer, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    """Training goes on meanwhile. A failure is raised at the next version."""
    gate = Gate()
    handed = list[str]()

    real = StagedFiles.stage_own_files

    def stage_own_files(staged: StagedFiles) -> None:
        gate()
        real(staged)
        handed.append(staged.directory.name[:12])
        if policy.version == 3:
            raise WeightError("its directory is full")

    monkeypatch.setattr(StagedFiles, "stage_own_files", stage_own_files)
    monkeypatch.setattr("streamrl.learner.files.staging.report", lambda what, said: None)
    publisher = made(policy, log)
    publisher.writer = None
    with pytest.raises(WeightError, match="full"), publisher:
        publisher.train(taken(0), idle_s=0.0)
        policy.step(taken(1))
        assert not handed
        gate.open()
        publisher.publish(1)
        publisher.wait()
        assert handed == [".tmp-v000001", ".tmp-v000002"]
        (first,) = publisher.checkpoints.glob(".tmp-v000001-*/*.safetensors")
        assert first.stat().st_size > 0
        assert versions(log) == [] and metrics(log) == [] and publisher.store.versions() == []
        publisher.train(taken(2), idle_s=0.0)
        publisher.wait()


class GatedCheckpoint:
    """Its files are written once the gate is open."""

    def __init__(self, real: PendingCheckpoint, gate: Gate) -> None:
        self._real = real
        self._gate = gate

    def wait(self) -> None:
        self._gate()
        self._real.wait()


def gated(policy: PolicyTrainer, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = policy.begin_checkpoint
    monkeypatch.setattr(
        policy, "begin_checkpoint", lambda directory: GatedCheckpoint(begin(directory), gate)
    )


def test_versions_are_trained_and_announced_while_a_checkpoint_is_written(
    policy: PolicyTrainer, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    """And it has the state of its own version."""
    gate = Gate()
    gated(policy, gate, monkeypatch)
    with made(policy, log) as publisher:
        policy.step(taken(0))
        wanted = [np.asarray(leaf).tobytes() for leaf in arrays(policy.state)]
        publisher.publish(0, checkpoint=True)
        for number in (1, 2):
            policy.step(taken(number))
            publisher.publish(number, checkpoint=False)
        until(lambda: [record.version for record in versions(log)] == [1, 2, 3], PATIENCE_S)
        assert checkpoints.versions(publisher.checkpoints) == []
        gate.open()
        publisher.wait()
    found = checkpoints.latest(publisher.checkpoints, 3)
    assert found is not None and (found.version, found.offset) == (1, 1)
    again = checkpoints.load(publisher.checkpoints, found, policy.state)
    assert [np.asarray(leaf).tobytes() for leaf in arrays(again)] == wanted


def test_checkpoints_are_copied_and_a_learner_elsewhere_goes_on_from_them(
    policy: PolicyTrainer, log: MemoryLog, run: RunFile, tmp_path: Path
):
    copied = with_overrides(run, [f"learner.checkpoint_copies=file://{tmp_path}/copies"])
    policy.run = copied
    with made(policy, log) as publisher:
        publisher.train(taken(0), idle_s=0.0)
    elsewhere = copied.model_copy(update={"runs_dir": str(tmp_path / "elsewhere")})
    found = newest_checkpoint(elsewhere, "lead", versions(log))
    assert found is not None and (found.version, found.offset) == (1, 1)
    directory = checkpoint_directory(elsewhere, "lead")
    again = checkpoints.load(directory, found, policy.state)
    assert [bytes(leaf) for leaf in map(np.asarray, arrays(again))] == [
        bytes(leaf) for leaf in map(np.asarray, arrays(policy.state))
    ]


def test_a_learner_that_resumes_copies_its_checkpoint_if_the_one_before_had_no_time_to(
    policy: PolicyTrainer, log: MemoryLog, run: RunFile, tmp_path: Path
):
    with made(policy, log) as publisher:
        publisher.train(taken(0), idle_s=0.0)
    policy.run = with_overrides(run, [f"learner.checkpoint_copies=file://{tmp_path}/copies"])
    copies = copies_of(policy.run, "lead")
    assert copies is not None and copies.versions() == []
    found = checkpoints.latest(publisher.checkpoints, 1)
    with made(policy, log) as publisher:
        publisher.announced |= {record.version: record for record in versions(log)}
        publisher.announce_start(found)
    assert copies.versions() == [1]


def test_copies_that_cannot_be_written_do_not_end_the_run(
    policy: PolicyTrainer, log: MemoryLog, run: RunFile, tmp_path: Path
):
    (tmp_path / "copies").write_text("")
    policy.run = with_overrides(run, [f"learner.checkpoint_copies=file://{tmp_path}/copies"])
    with made(policy, log) as publisher:
        publisher.train(taken(0), idle_s=0.0)
    assert checkpoints.versions(publisher.checkpoints) == [1]


def arrays(state: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]


def test_what_fails_is_raised_while_there_is_nothing_to_train_on(
    policy: PolicyTrainer, log: MemoryLog
):
    with (
        pytest.raises(
            Fenced, match="^learner-lead: another process with this identity has taken over"
        ),
        made(policy, log) as publisher,
    ):
        log.writer("learner-lead")
        publisher.train(taken(0), idle_s=0.0)
        until_it_fails(publisher)
    assert (
        versions(log) == []
        and metrics(log) == []
        and checkpoints.versions(publisher.checkpoints) == []
    )


def test_what_fails_is_raised_at_the_next_version(policy: PolicyTrainer, log: MemoryLog):
    """And nothing comes of that one."""
    with (
        pytest.raises(WeightError, match="^the weight store is full: v000001$"),
        made(policy, log) as publisher,
    ):
        publisher.store = FullStore(publisher.store.root)
        publisher.train(taken(0), idle_s=0.0)
        publisher.train(taken(1), idle_s=0.0)
    assert (
        versions(log) == []
        and publisher.store.versions() == []
        and checkpoints.versions(publisher.checkpoints) == []
    )


def test_what_fails_is_raised_at_the_end(policy: PolicyTrainer, log: MemoryLog):
    with pytest.raises(WeightError, match="is full: v000001$"), made(policy, log) as publisher:
        publisher.store = FullStore(publisher.store.root)
        publisher.train(taken(0), idle_s=0.0)


def test_a_checkpoint_that_cannot_be_written_takes_no_version_away(
    policy: PolicyTrainer, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    def full(directory: Path) -> None:
        raise CheckpointError("no space left")

    monkeypatch.setattr(policy, "begin_checkpoint", full)
    with pytest.raises(CheckpointError, match="^no space left$"), made(policy, log) as publisher:
        publisher.train(taken(0), idle_s=0.0)
    assert [record.version for record in versions(log)] == [1] and checkpoints.versions(
        publisher.checkpoints
    ) == []
