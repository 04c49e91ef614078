"""Publishing of versions: the weights of version k + 1 are written, hashed and announced while the
next batch is trained.

Training donates its buffers, so before the next step we copy the weights, compute the probe and, if
a checkpoint is due, copy the optimizer state. This runs on the training thread, because it is a
collective over all processes. Writing, hashing and announcing then run on one background thread of
rank zero, in order and at most one version late. The files of a large model are divided among the
processes, so the others have such a thread, too (`snapshot.py`). Checkpoints are written during
that, one at a time, as they are several times as large as a version. A failure there is raised on
the training thread: at the next poll for a batch, or at the next version.

After a crash in between, the batch is trained again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from streamrl.config import topology
from streamrl.learner.adapter_base import publish_base
from streamrl.learner.background import BackgroundWorker
from streamrl.learner.files import checkpoints
from streamrl.learner.files.checkpoints import PendingCheckpoint, TrainingPosition
from streamrl.learner.inputs import TrainingInput
from streamrl.learner.recompute import version_mismatch
from streamrl.learner.reference import reference_version
from streamrl.learner.snapshot import ExportResult, WeightsSnapshot
from streamrl.learner.trainer import PolicyTrainer, checkpoint_directory, copies_of
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Output, Writer
from streamrl.stream.records import AdapterBase, PolicyVersion, Probe
from streamrl.system.errors import CheckpointError, WeightError
from streamrl.weights.store import Store, pinned_for_eval

logger = logging.getLogger(__name__)
T = TypeVar("T")


@contextmanager
def timed(durations_s: dict[str, float], name: str) -> Generator[None]:
    """Record under `name` how many seconds the block took."""
    started = time.monotonic()
    yield
    durations_s[name] = time.monotonic() - started


@dataclass
class PendingVersion:
    """A version that is being published. The stages fill in its fields in order."""

    batch: int | None  # The batch that it was trained on.
    snapshot: WeightsSnapshot
    previous: PolicyVersion | None = None  # An earlier announcement of this version.
    probe: Probe | None = None
    export: ExportResult | None = None
    # The seconds that each stage took.
    durations_s: dict[str, float] = field(
        default_factory=lambda: {"hash_s": 0.0, "announce_s": 0.0}
    )

    @property
    def number(self) -> int:
        return self.snapshot.position.version

    @property
    def is_new(self) -> bool:
        """Whether the version has to be announced: it does not if it was announced before, with the
        same weights in the same place.
        """
        stored = self.export and self.export.stored
        return stored is not None and (
            self.previous is None
            or (self.previous.sha256, self.previous.uri) != (stored.sha256, stored.uri)
        )


@dataclass
class VersionPublisher:
    """Publishes the versions of a policy. As a context manager, it waits at its end for the pending
    version and closes its worker. Without a `writer`, this process only trains, and another process
    of the learner publishes.
    """

    learner: str
    policy: PolicyTrainer
    announced: dict[int, PolicyVersion]  # the newest lineage of each version
    writer: Writer | None
    meter: Meter | None = None
    # Raises Fenced if another process has announced as this learner since this one did.
    check_rival: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.store = Store(f"{self.policy.run.store}/{self.learner}")
        self.checkpoints = checkpoint_directory(self.policy.run, self.learner)
        self._background = BackgroundWorker()
        self._checkpointing = BackgroundWorker()
        self._saved = -1  # The version of the newest checkpoint.
        self._base: AdapterBase | None = None  # The base of the versions if they are adapters.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cause: type[BaseException] | None, *_: object) -> None:
        self._background.close()
        self._checkpointing.close()
        if cause is None:
            self._raise_if_failed()

    def train(self, taken: TrainingInput, idle_s: float) -> None:
        """Train on one batch, after a wait of `idle_s`, and publish the new version. Raises
        failures of the version before.
        """
        if not self.policy.is_due(taken.batch):
            return
        measured = self.policy.step(taken)
        batch = taken.batch
        if len(batch.uids):
            age = batch.number - batch.oldest_versions
            measured |= {"batch_age_mean": float(age.mean()), "batch_age_max": float(age.max())}
        self.publish(batch.number, {**measured, "idle_s": idle_s})

    def publish(
        self,
        batch: int | None,
        measured: Mapping[str, float] | None = None,
        checkpoint: bool | None = None,
    ) -> PendingVersion:
        """Publish the policy, which was trained on `batch`. Returns as soon as training may
        continue.

        A version that was announced before is not announced again if its weights are the same.
        `measured` is published together with the durations, once they are known. `checkpoint` tells
        whether to write a checkpoint; by default `learner.checkpoint_every` decides. Raises
        failures of the version before.
        """
        policy = self.policy
        if checkpoint is None:
            checkpoint = batch is None or policy.version % policy.run.learner.checkpoint_every == 0
        blocked_s = dict[str, float]()
        with timed(blocked_s, "publish_s"):
            with timed(blocked_s, "publish_wait_s"):
                self._background.wait()
                self._raise_if_failed()
            with timed(blocked_s, "export_s"):
                previous = self.announced.get(policy.version)
                version = PendingVersion(batch, policy.snapshot(self.checkpoints), previous)
            if self.writer is None:
                self._background.submit(version.snapshot.stage_own_files)
            self._in_background(partial(self._write_weights, version))
            with timed(blocked_s, "probe_s"):
                version.probe = policy.probe()
            announced = self._in_background(partial(self._announce, version))
            with timed(blocked_s, "checkpoint_s"):
                if checkpoint:
                    self._begin_checkpoint(announced)
        self._in_background(
            partial(self._publish_metrics, version, blocked_s, measured, time.time())
        )
        return version

    def announce_start(self, checkpoint: TrainingPosition | None) -> None:
        """Announce the version that training begins with, unless it has been announced: that of the
        learner's `checkpoint`, or the initial model.

        If the newest announced version is missing from the store, it is written again.
        """
        if self.writer is not None:
            self.store.clear()
        self._publish_base()
        if checkpoint is None:
            self.publish(None)  # version 0 is the initial model, announced before training
            self.wait()
            return
        self._saved = checkpoint.version
        known = self.announced[checkpoint.version]
        if checkpoint.version == max(self.announced) or known.sha256 != checkpoint.sha256:
            self.publish(known.batch, checkpoint=False)
            self.wait()
        if self.writer is not None:
            # The process before may have been killed while it copied.
            self._checkpointing.submit(partial(self._copy_checkpoint, checkpoint.version))

    def _publish_base(self) -> None:
        """Put the base of the adapters into the store, before the first of them is announced."""
        form = self.policy.adapter
        if form is None:
            return
        check = self.policy.random_adapter()
        if self.writer is not None:
            origin = self.policy.initial_model_dir
            self._base = publish_base(origin, form, check, self.policy.run.store)

    def save_last_checkpoint(self) -> None:
        """At a clean stop, write a checkpoint of the newest version, so that nothing has to be
        trained again. All processes of a learner call this together.
        """
        self.wait()
        if self._saved == self.policy.version:
            return
        self._begin_checkpoint()
        self.wait()

    def _begin_checkpoint(self, announced: Future[None] | None = None) -> None:
        """Copy the state off the devices, once the checkpoint before is whole, and write it in the
        background. `announced`: the version is being announced meanwhile.
        """
        self._checkpointing.wait()
        pending = self.policy.begin_checkpoint(self.checkpoints)
        self._saved = self.policy.version
        work = pending.wait
        if self.writer is not None:
            work = partial(self._complete_checkpoint, self.policy.position, pending, announced)
        self._checkpointing.submit(work)

    def wait(self) -> None:
        """Wait for the pending version and the pending checkpoint. Raises their failures."""
        self._background.wait()
        self._checkpointing.wait()

    def _raise_if_failed(self) -> None:
        self._background.raise_if_failed()
        self._checkpointing.raise_if_failed()

    def until_failure(self, inputs: Iterator[T]) -> Iterator[T]:
        """The inputs, for as long as publishing has not failed. Raises the failure of the pending
        version.
        """
        for item in inputs:
            self._raise_if_failed()
            yield item

    # ---- in the background --------------------------------------------------------------------

    def _in_background(self, work: Callable[[], None]) -> Future[None] | None:
        return self._background.submit(work) if self.writer is not None else None

    def _write_weights(self, version: PendingVersion) -> None:
        """Put the version into the store, if it has to be there."""
        snapshot = version.snapshot
        snapshot.exchange_shards()
        if self._is_to_be_written(version):
            version.export = snapshot.put_into_store(self.store)
        if snapshot.staged is not None:
            snapshot.staged.remove()

    def _is_to_be_written(self, version: PendingVersion) -> bool:
        """False for a version that has the announced hash and is in the store already or is not the
        newest.
        """
        known = version.previous
        if known is not None:
            sha256 = version.snapshot.sha256()
            if sha256 == known.sha256:
                logger.info(
                    "version %d: trained again, %s as announced", version.number, sha256[:12]
                )
                if version.number < max(self.announced) or self.store.holds(known):
                    return False
                logger.warning(
                    "version %d is not in the weight store any more: it is written again",
                    version.number,
                )
            elif self.policy.run.learner.on_divergence == "stop":
                raise version_mismatch(self.learner, version.number, sha256, known.sha256)
            else:
                logger.warning(
                    "version %d came out as %s, but %s was announced: it is announced again, as"
                    " lineage %d",
                    version.number,
                    sha256[:12],
                    known.sha256[:12],
                    known.lineage + 1,
                )
        return True

    def _announce(self, version: PendingVersion) -> None:
        """Announce the version, and commit how far the inputs have been consumed."""
        started = time.monotonic()
        run = self.policy.run
        snapshot = version.snapshot
        if version.is_new:
            assert self.writer is not None and version.export is not None
            known = version.previous
            record = PolicyVersion(
                learner=self.learner,
                version=version.number,
                batch=version.batch,
                probe=version.probe,
                vocab_size=snapshot.vocab_size,
                skipped=snapshot.skipped,
                time_s=time.time(),
                lineage=0 if known is None else known.lineage + 1,
                replaces="" if known is None else known.sha256,
                base=self._base,
                **version.export.stored._asdict(),
            )
            self.writer.commit([to_message(Output(topology.POLICY_VERSIONS, self.learner, record))])
            self.announced[version.number] = record
            logger.info(
                "version %d: %s%s",
                version.number,
                record.sha256[:12],
                ", nothing was trained on its batch" if record.skipped else "",
            )
        newest = max(self.announced)
        if version.number == newest:
            offsets = {topology.BATCHES_PARTITION: snapshot.position.offset}
            if run.learner.needs_scores:
                offsets[topology.SCORES_PARTITION] = snapshot.position.scores
            assert self.writer is not None
            self.writer.commit_offsets(offsets)
            self._prune_store(newest)
        version.durations_s["announce_s"] = time.monotonic() - started

    def _prune_store(self, newest: int) -> None:
        """Delete old versions from the store. If that fails, the next version tries again."""
        try:
            self.store.prune(
                newest,
                self.policy.run.weights.keep_versions,
                keep_also=self._pinned_versions(newest),
            )
        except WeightError as error:
            logger.warning("old versions stay in the weight store: %s", error)

    def _complete_checkpoint(
        self,
        position: TrainingPosition,
        pending: PendingCheckpoint,
        announced: Future[None] | None,
    ) -> None:
        """Turn the saved state into a checkpoint once it is written, under the hash that the
        version was announced with. A process that was taken for dead must not touch its successor's
        checkpoints.
        """
        started = time.monotonic()
        pending.wait()
        if announced is not None:
            announced.result()
            self._background.raise_if_failed()
        self.check_rival()
        position = position._replace(sha256=self.announced[position.version].sha256)
        checkpoints.complete(self.checkpoints, position, self.policy.run.learner.keep_checkpoints)
        self._copy_checkpoint(position.version)
        logger.info(
            "version %d: its checkpoint was written in %.1f s, during training",
            position.version,
            time.monotonic() - started,
        )

    def _copy_checkpoint(self, version: int) -> None:
        """Copy a checkpoint to learner.checkpoint_copies. If that fails, the run continues with its
        own checkpoints, and the next one is copied again.
        """
        copies = copies_of(self.policy.run, self.learner)
        if copies is None:
            return
        try:
            copies.put(self.checkpoints, version, self.policy.run.learner.keep_checkpoints)
        except CheckpointError as error:
            logger.warning("the checkpoint of version %d is not copied: %s", version, error)

    def _publish_metrics(
        self,
        version: PendingVersion,
        blocked_s: Mapping[str, float],
        measured: Mapping[str, float] | None,
        time_s: float,
    ) -> None:
        """Publish how long each stage took. `blocked_s`: the stages that training waited for, until
        `time_s`.
        """
        written = (
            {"export_s": version.export.export_s, "hash_s": version.export.hash_s}
            if version.export
            else {}
        )
        for name, seconds in (*blocked_s.items(), *written.items()):
            version.durations_s[name] = version.durations_s.get(name, 0.0) + seconds
        if self.meter is not None and measured is not None:
            values = {
                f"learner/{name}": value
                for name, value in {**measured, **version.durations_s}.items()
            }
            self.meter.publish(values, step=version.batch, time_s=time_s)

    def _pinned_versions(self, version: int) -> set[int]:
        """Versions that others may still have to pull, besides the newest: the reference, for the
        scorers, and versions that the evaluator evaluates. Version 0 is not among them, because the
        scorers make it themselves.
        """
        run = self.policy.run
        pinned = pinned_for_eval(version, run.weights.keep_versions, run.eval.interval)
        reference = reference_version(run, version) if run.learner.pool_scores_reference else 0
        if reference:
            pinned.add(reference)
        return pinned
