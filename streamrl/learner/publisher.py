"""The policy in training, and what is made known of it. Version k + 1 is written, hashed and
announced while the next batch is trained.

What the next step takes away is taken first: the weights into memory of their own, the probe, and
the optimiser's state where a checkpoint is due. That is done in the learner's own thread, as its
processes come to it together. The rest is done in one other thread of the first process, in order,
and at most one version behind: the next one waits for it. What fails there is raised in the
learner's own thread: at the next look for a batch, or at the next version.

A crash in between means that the batch is trained again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from streamrl.config import topology
from streamrl.errors import WeightError
from streamrl.learner import checkpoints
from streamrl.learner.background import BackgroundWorker
from streamrl.learner.checkpoints import TrainingPosition
from streamrl.learner.inputs import TrainingInput
from streamrl.learner.recompute import version_mismatch
from streamrl.learner.reference import reference_version
from streamrl.learner.trainer import (
    ExportResult,
    PolicyTrainer,
    WeightsSnapshot,
    checkpoint_directory,
)
from streamrl.log.codec import to_message
from streamrl.log.meter import Meter
from streamrl.log.protocol import Output, Writer
from streamrl.records import PolicyVersion, Probe
from streamrl.weights.store import Store, every_nth

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class PendingVersion:
    """One on its way. Its fields are filled in as it goes; what it is handed to next reads them."""

    batch: int | None  # that it was trained on
    snapshot: WeightsSnapshot
    previous: PolicyVersion | None = None  # it was announced before
    probe: Probe | None = None
    export: ExportResult | None = None
    # s, by stage
    durations_s: dict[str, float] = field(
        default_factory=lambda: {"hash_s": 0.0, "announce_s": 0.0, "checkpoint_s": 0.0}
    )

    @property
    def number(self) -> int:
        return self.snapshot.position.version

    @property
    def is_new(self) -> bool:
        """Is it to be announced? Not where it came out as it was announced before, and lies in the
        same place.
        """
        stored = self.export and self.export.stored
        return stored is not None and (
            self.previous is None
            or (self.previous.sha256, self.previous.uri) != (stored.sha256, stored.uri)
        )


@dataclass
class VersionPublisher:
    """To be used in a `with`: its end waits for the version under way.
    With no `writer` another process of this learner does all but the training.
    """

    learner: str
    policy: PolicyTrainer
    announced: dict[int, PolicyVersion]  # the newest lineage of each version
    writer: Writer | None
    meter: Meter | None = None
    # raises Fenced where another process has announced as this learner since this one did
    check_rival: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.store = Store(f"{self.policy.run.store}/{self.learner}")
        self.checkpoints = checkpoint_directory(self.policy.run, self.learner)
        self._background = BackgroundWorker()
        self._saved = -1  # version of the newest checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cause: type[BaseException] | None, *_: object) -> None:
        self._background.close()
        if cause is None:
            self._background.raise_if_failed()

    def train(self, taken: TrainingInput, idle_s: float) -> None:
        """One step, after a wait of `idle_s`, and its version. Raises what the version before has
        failed of.
        """
        if not self.policy.is_due(taken.batch):
            return
        measured, batch = self.policy.step(taken), taken.batch
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
        """Have the policy, trained on `batch`, announced. A version that is announced already is
        left alone where it comes out the same.

        Returns as soon as training may go on. `measured`: published with what it took, once that is
        known. `checkpoint`: whether one is written; by default, when `learner.checkpoint_every`
        says so. Raises what the version before has failed of.
        """
        times = [time.monotonic()]
        self.wait()
        times.append(time.monotonic())
        policy = self.policy
        version = PendingVersion(batch, policy.snapshot(), self.announced.get(policy.version))
        times.append(time.monotonic())
        self._in_background(partial(self._write_weights, version))
        version.probe = policy.probe()  # beside the writing
        times.append(time.monotonic())
        self._in_background(partial(self._announce, version))
        if checkpoint is None:
            checkpoint = batch is None or policy.version % policy.run.learner.checkpoint_every == 0
        if checkpoint:
            self._save_state()
        times.append(time.monotonic())
        names = ("publish_wait_s", "export_s", "probe_s", "checkpoint_s")
        stood = {
            "publish_s": times[-1] - times[0],
            **{
                name: end - start for name, start, end in zip(names, times, times[1:], strict=False)
            },
        }
        if checkpoint:
            self._in_background(partial(self._complete_checkpoint, version))
        self._in_background(partial(self._publish_metrics, version, stood, measured, time.time()))
        return version

    def announce_start(self, found: TrainingPosition | None) -> None:
        """Announce what training begins with, where that is news: the initial model, or a
        checkpoint (`found`) that the announcements disagree with.

        The newest version that is announced is written to the store again where it is gone from
        there.
        """
        if self.writer is not None:
            self.store.clear()
        if found is None:
            self.publish(None)  # version 0 is the initial model, announced before training
        else:
            self._saved = found.version
            known = self.announced[found.version]
            if found.version < max(self.announced) and known.sha256 == found.sha256:
                return
            self.publish(known.batch, checkpoint=False)
        self.wait()

    def save_last_checkpoint(self) -> None:
        """At a clean end: write a checkpoint of the newest version, so that the next life trains on
        nothing again.

        The processes of a learner come to it together.
        """
        self.wait()
        if self._saved == self.policy.version:
            return
        version = PendingVersion(None, self.policy.snapshot())
        self._save_state()
        self._in_background(partial(self._complete_checkpoint, version))
        self.wait()

    def _save_state(self) -> None:
        self.policy.save_state(self.checkpoints)
        self._saved = self.policy.version

    def wait(self) -> None:
        """Wait for the version under way. Raises what it has failed of."""
        self._background.wait()

    def until_failure(self, coming: Iterator[T]) -> Iterator[T]:
        """What comes, as long as nothing has failed meanwhile. Raises what the version under way
        has failed of.
        """
        for found in coming:
            self._background.raise_if_failed()
            yield found

    # ---- beside the next step --------------------------------------------------------------------

    def _in_background(self, work: Callable[[], None]) -> None:
        if self.writer is not None:
            self._background.submit(work)

    def _write_weights(self, version: PendingVersion) -> None:
        """Put the version into the store, unless it came out as it was announced before, and still
        lies there if it is the newest.
        """
        known = version.previous
        if known is not None:
            sha256 = version.snapshot.sha256()
            if sha256 == known.sha256:
                logger.info(
                    "version %d: trained again, %s as announced", version.number, sha256[:12]
                )
                if version.number < max(self.announced) or self.store.holds(known):
                    return
                logger.warning(
                    "version %d is not in the weight store any more: it is written again",
                    version.number,
                )
            elif self.policy.run.learner.on_divergence == "stop":
                raise version_mismatch(self.learner, version.number, sha256, known.sha256)
            else:
                said = "version %d came out as %s, but %s was announced: it is announced again, as lineage %d"
                logger.warning(
                    said, version.number, sha256[:12], known.sha256[:12], known.lineage + 1
                )
        version.export = version.snapshot.write(self.store)

    def _announce(self, version: PendingVersion) -> None:
        """The version exists, and with it the batches up to its own are dealt with."""
        started, run, snapshot, position = (
            time.monotonic(),
            self.policy.run,
            version.snapshot,
            version.snapshot.position,
        )
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
            places = {topology.sole_partition(topology.BATCHES): position.offset}
            if run.learner.uses_scorer_pool:
                places[topology.sole_partition(topology.SCORES)] = position.scores
            assert self.writer is not None
            self.writer.commit_offsets(places)
            self._prune_store(newest)
        version.durations_s["announce_s"] = time.monotonic() - started

    def _prune_store(self, newest: int) -> None:
        """Best effort: what is left is pruned with the next version."""
        try:
            self.store.prune(
                newest, self.policy.run.weights.keep_versions, but=self._pinned_versions(newest)
            )
        except WeightError as error:
            logger.warning("old versions stay in the weight store: %s", error)

    def _complete_checkpoint(self, version: PendingVersion) -> None:
        """Its state is written: with the hash that it is announced as, that is a checkpoint. A
        process that was taken for dead leaves its successor's alone.
        """
        started = time.monotonic()
        self.check_rival()
        position = version.snapshot.position._replace(sha256=self.announced[version.number].sha256)
        checkpoints.complete(self.checkpoints, position, self.policy.run.learner.keep_checkpoints)
        version.durations_s["checkpoint_s"] = time.monotonic() - started

    def _publish_metrics(
        self,
        version: PendingVersion,
        stood: Mapping[str, float],
        measured: Mapping[str, float] | None,
        time_s: float,
    ) -> None:
        """What it took is known. `stood`: what of it training stood still for, until `time_s`."""
        written = (
            {"export_s": version.export.export_s, "hash_s": version.export.hash_s}
            if version.export
            else {}
        )
        for name, seconds in (*stood.items(), *written.items()):
            version.durations_s[name] = version.durations_s.get(name, 0.0) + seconds
        if self.meter is not None and measured is not None:
            values = {
                f"learner/{name}": value
                for name, value in {**measured, **version.durations_s}.items()
            }
            self.meter.publish(values, step=version.batch, time_s=time_s)

    def _pinned_versions(self, version: int) -> set[int]:
        """Versions that others still have to find: the scorers, which make version 0 themselves,
        and the evaluator.
        """
        run = self.policy.run
        reference = reference_version(run, version) if run.learner.uses_scorer_pool else 0
        return ({reference} if reference else set[int]()) | every_nth(
            version, run.weights.keep_versions, run.eval.interval
        )
