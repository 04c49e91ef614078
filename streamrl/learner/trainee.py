"""The policy in training, and what is made known of it. Version k + 1 is written, hashed and announced while the next batch is trained.

What the next step takes away is taken first: the weights into memory of their own, the probe, and the optimiser's state where a checkpoint is due.
That is done in the learner's own thread, as its processes come to it together. The rest is done in one other thread of the first process, in order,
and at most one version behind: the next one waits for it. What fails there is raised in the learner's own thread: at the next look for a batch, or
at the next version.

A crash in between means that the batch is trained again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

from streamrl.learner import checkpoints
from streamrl.learner.reading import Taken
from streamrl.learner.recompute import check
from streamrl.learner.reference import reference_of
from streamrl.learner.training import Snapshot, Training, Written, checkpoint_directory
from streamrl.metrics import Meter
from streamrl.records import PolicyVersion, Probe
from streamrl.stream.codec import to_message
from streamrl.stream.log import Output, Writer
from streamrl.weights.store import Store, every_nth

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Told(NamedTuple):
    """What else belongs to a version, beside its weights."""

    batch: int | None  # that it was trained on
    probe: Probe | None  # None: it is announced already
    checkpoint: bool  # its state is written, and is a checkpoint once the hash of the weights is known
    spent: Mapping[str, float]  # seconds in the learner's own thread, by stage
    measured: Mapping[str, float]  # of the step; nothing for the version that a learner begins with
    time_s: float  # when training could go on


@dataclass
class Trainee:
    """To be used in a `with`: its end waits for the version under way. With no `writer` another process of this learner does all but the training."""

    learner: str
    policy: Training
    announced: dict[int, str]  # version -> sha256
    writer: Writer | None
    meter: Meter | None = None

    def __post_init__(self) -> None:
        self.store = Store(f"{self.policy.run.store}/{self.learner}")
        self.checkpoints = checkpoint_directory(self.policy.run, self.learner)
        self._beside = ThreadPoolExecutor(1, "publisher")
        self._under_way: Future[dict[str, float]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cause: type[BaseException] | None, *_: object) -> None:
        self._beside.shutdown()
        if cause is None:
            self.settle()

    def train(self, taken: Taken, idle_s: float) -> None:
        """One step, after a wait of `idle_s`, and its version. Raises what the version before has failed of."""
        measured, batch = self.policy.step(taken), taken.batch
        age = batch.number - batch.oldest_versions
        self.publish(batch.number, {**measured, "idle_s": idle_s, "batch_age_mean": float(age.mean()), "batch_age_max": float(age.max())})

    def publish(self, batch: int | None, measured: Mapping[str, float] | None = None) -> None:
        """Have the policy, trained on `batch`, announced; a version that is announced already must come out the same, and is left alone.

        Returns as soon as training may go on. `measured`: published with what it took, once that is known. Raises what the version before has failed
        of.
        """
        began = time.monotonic()
        self.settle()
        settled = time.monotonic()
        policy, settings, known = self.policy, self.policy.run.learner, self.policy.version in self.announced
        snapshot = policy.snapshot()
        taken = time.monotonic()
        writing = self._beside.submit(self._write, snapshot) if self.writer is not None else None
        probe = None if known else policy.probe()  # beside the writing
        probed = time.monotonic()
        if checkpoint := batch is None or policy.version % settings.checkpoint_every == 0:
            policy.save_state(self.checkpoints)
        done = time.monotonic()
        spent = {"publish_wait_s": settled - began, "export_s": taken - settled, "probe_s": probed - taken}
        spent |= {"checkpoint_s": done - probed, "publish_s": done - began}
        if writing is not None:
            told = Told(batch, probe, checkpoint, spent, measured or {}, time.time())
            self._under_way = self._beside.submit(self._tell, snapshot, writing, told)

    def settle(self) -> dict[str, float]:
        """Wait for the version under way. Returns what it took, by stage; nothing if there was none. Raises what it has failed of."""
        under_way, self._under_way = self._under_way, None
        return {} if under_way is None else under_way.result()

    def watched(self, coming: Iterator[T]) -> Iterator[T]:
        """What comes, as long as nothing has failed meanwhile. Raises what the version under way has failed of."""
        for found in coming:
            if self._under_way is not None and self._under_way.done():
                self._under_way.result()
            yield found

    # ---- beside the next step ---------------------------------------------------------------------------------------------------------

    def _write(self, snapshot: Snapshot) -> Written | None:
        """The weights into the store; None for a version that is announced already, and has come out the same."""
        version = snapshot.position.version
        if version not in self.announced:
            return snapshot.write(self.store)
        check(self.learner, self.announced, version, snapshot.sha256())
        logger.info("version %d: trained again, %s as announced", version, self.announced[version][:12])
        return None

    def _tell(self, snapshot: Snapshot, writing: Future[Written | None], told: Told) -> dict[str, float]:
        """Once its weights are written: the announcement, the checkpoint, the metrics. Returns what the version took, by stage."""
        spent, position = dict(told.spent), snapshot.position
        if written := writing.result():
            started = time.monotonic()
            self._announce(snapshot, written, told)
            spent |= {"export_s": spent["export_s"] + written.export_s, "hash_s": written.hash_s, "announce_s": time.monotonic() - started}
        else:
            spent |= {"hash_s": 0.0, "announce_s": 0.0}
        if told.checkpoint:
            started = time.monotonic()
            position = position._replace(sha256=self.announced[position.version])
            checkpoints.complete(self.checkpoints, position, self.policy.run.learner.keep_checkpoints)
            spent["checkpoint_s"] += time.monotonic() - started
        if self.meter is not None and told.measured:
            values = {f"learner/{name}": value for name, value in {**told.measured, **spent}.items()}
            self.meter.publish(values, step=told.batch, time_s=told.time_s)
        return spent

    def _announce(self, snapshot: Snapshot, written: Written, told: Told) -> None:
        """In one transaction: the version exists, and the batches up to its own are dealt with."""
        assert self.writer is not None, "only then something is written"
        run, position, stored = self.policy.run, snapshot.position, written.stored
        record = PolicyVersion(
            learner=self.learner,
            version=position.version,
            batch=told.batch,
            probe=told.probe,
            vocab_size=snapshot.vocab_size,
            time_s=time.time(),
            **stored._asdict(),
        )
        places = {("batches", 0): position.offset, **({("scores", 0): position.scores} if run.learner.pooled else {})}
        self.writer.commit([to_message(Output("policy-versions", self.learner, record))], places)
        self.announced[position.version] = stored.sha256
        self.store.prune(position.version, run.weights.keep_versions, but=self._awaited(position.version))
        logger.info("version %d: %s", position.version, stored.sha256[:12])

    def _awaited(self, version: int) -> set[int]:
        """Versions that others still have to find: the scorers, which make version 0 themselves, and the evaluator."""
        run = self.policy.run
        reference = reference_of(run, version) if run.learner.pooled else 0
        return ({reference} if reference else set[int]()) | every_nth(version, run.weights.keep_versions, run.eval.interval)
