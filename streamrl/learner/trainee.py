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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from streamrl.learner import checkpoints
from streamrl.learner.beside import Beside
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


@dataclass
class Version:
    """One on its way. Its fields are filled in as it goes; what it is handed to next reads them."""

    batch: int | None  # that it was trained on
    snapshot: Snapshot
    probe: Probe | None = None
    written: Written | None = None  # None, too: it was announced before, and is left alone
    spent: dict[str, float] = field(default_factory=lambda: {"hash_s": 0.0, "announce_s": 0.0, "checkpoint_s": 0.0})  # s, by stage

    @property
    def number(self) -> int:
        return self.snapshot.position.version


@dataclass
class Trainee:
    """To be used in a `with`: its end waits for the version under way, and closes writer and meter. With no `writer` another process of this learner
    does all but the training."""

    learner: str
    policy: Training
    announced: dict[int, str]  # version -> sha256
    writer: Writer | None
    meter: Meter | None = None

    def __post_init__(self) -> None:
        self.store = Store(f"{self.policy.run.store}/{self.learner}")
        self.checkpoints = checkpoint_directory(self.policy.run, self.learner)
        self._beside = Beside()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cause: type[BaseException] | None, *_: object) -> None:
        self._beside.close()
        try:
            if cause is None:
                self._beside.check()
        finally:
            for mine in (self.writer, self.meter):
                if mine is not None:
                    mine.close()

    def train(self, taken: Taken, idle_s: float) -> None:
        """One step, after a wait of `idle_s`, and its version. Raises what the version before has failed of."""
        measured, batch = self.policy.step(taken), taken.batch
        age = batch.number - batch.oldest_versions
        self.publish(batch.number, {**measured, "idle_s": idle_s, "batch_age_mean": float(age.mean()), "batch_age_max": float(age.max())})

    def publish(self, batch: int | None, measured: Mapping[str, float] | None = None) -> Version:
        """Have the policy, trained on `batch`, announced; a version that is announced already must come out the same, and is left alone.

        Returns as soon as training may go on. `measured`: published with what it took, once that is known. Raises what the version before has failed
        of.
        """
        times = [time.monotonic()]
        self.settle()
        times.append(time.monotonic())
        policy, known = self.policy, self.policy.version in self.announced
        version = Version(batch, policy.snapshot())
        times.append(time.monotonic())
        self._later(partial(self._recompute if known else self._write, version))
        version.probe = None if known else policy.probe()  # beside the writing
        times.append(time.monotonic())
        if not known:
            self._later(partial(self._announce, version))
        if checkpoint := batch is None or policy.version % policy.run.learner.checkpoint_every == 0:
            policy.save_state(self.checkpoints)
        times.append(time.monotonic())
        names = ("publish_wait_s", "export_s", "probe_s", "checkpoint_s")
        stood = {"publish_s": times[-1] - times[0], **{name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}}
        if checkpoint:
            self._later(partial(self._complete, version))
        self._later(partial(self._measure, version, stood, measured, time.time()))
        return version

    def settle(self) -> None:
        """Wait for the version under way. Raises what it has failed of."""
        self._beside.settle()

    def watched(self, coming: Iterator[T]) -> Iterator[T]:
        """What comes, as long as nothing has failed meanwhile. Raises what the version under way has failed of."""
        for found in coming:
            self._beside.check()
            yield found

    # ---- beside the next step ---------------------------------------------------------------------------------------------------------

    def _later(self, work: Callable[[], None]) -> None:
        if self.writer is not None:
            self._beside.do(work)

    def _recompute(self, version: Version) -> None:
        check(self.learner, self.announced, version.number, version.snapshot.sha256())
        logger.info("version %d: trained again, %s as announced", version.number, self.announced[version.number][:12])

    def _write(self, version: Version) -> None:
        version.written = version.snapshot.write(self.store)

    def _announce(self, version: Version) -> None:
        """The version exists, and with it the batches up to its own are dealt with."""
        started, run, snapshot, position = time.monotonic(), self.policy.run, version.snapshot, version.snapshot.position
        assert self.writer is not None and version.written is not None, "written before"
        told = {"probe": version.probe, "vocab_size": snapshot.vocab_size, "time_s": time.time()}
        stored = version.written.stored
        record = PolicyVersion(learner=self.learner, version=version.number, batch=version.batch, **told, **stored._asdict())
        places = {("batches", 0): position.offset, **({("scores", 0): position.scores} if run.learner.pooled else {})}
        self.writer.commit([to_message(Output("policy-versions", self.learner, record))])
        self.writer.mark(places)
        self.announced[version.number] = stored.sha256
        self.store.prune(version.number, run.weights.keep_versions, but=self._awaited(version.number))
        version.spent["announce_s"] = time.monotonic() - started
        logger.info("version %d: %s", version.number, stored.sha256[:12])

    def _complete(self, version: Version) -> None:
        """Its state is written: with the hash that it is announced as, that is a checkpoint."""
        started = time.monotonic()
        position = version.snapshot.position._replace(sha256=self.announced[version.number])
        checkpoints.complete(self.checkpoints, position, self.policy.run.learner.keep_checkpoints)
        version.spent["checkpoint_s"] = time.monotonic() - started

    def _measure(self, version: Version, stood: Mapping[str, float], measured: Mapping[str, float] | None, time_s: float) -> None:
        """What it took is known. `stood`: what of it training stood still for, until `time_s`."""
        written = {"export_s": version.written.export_s, "hash_s": version.written.hash_s} if version.written else {}
        for name, seconds in (*stood.items(), *written.items()):
            version.spent[name] = version.spent.get(name, 0.0) + seconds
        if self.meter is not None and measured is not None:
            values = {f"learner/{name}": value for name, value in {**measured, **version.spent}.items()}
            self.meter.publish(values, step=version.batch, time_s=time_s)

    def _awaited(self, version: int) -> set[int]:
        """Versions that others still have to find: the scorers, which make version 0 themselves, and the evaluator."""
        run = self.policy.run
        reference = reference_of(run, version) if run.learner.pooled else 0
        return ({reference} if reference else set[int]()) | every_nth(version, run.weights.keep_versions, run.eval.interval)
