"""Learner: batches in, policy versions out. Batch k is trained at version k and gives version k + 1.

Not a fold like the others, as its output is not only records: a checkpoint stores the place in `batches` it belongs to. After a crash the batches
since are trained on again, give the same weights, hash by hash, and nothing is announced twice.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from levanter.trainer_state import TrainerState

from streamrl.batcher.packing import expand
from streamrl.batcher.parts import Joiner
from streamrl.config import RunFile
from streamrl.errors import ModelError
from streamrl.learner import checkpoints, model
from streamrl.learner.checkpoints import Position
from streamrl.learner.initial import origin
from streamrl.learner.mesh import keep_compiled
from streamrl.learner.update import Updater
from streamrl.metrics import Meter
from streamrl.records import Batch, BatchPart, PolicyVersion, Probe, token_dtype
from streamrl.stream.codec import to_event, to_message
from streamrl.stream.log import Log, Output, Writer, read
from streamrl.weights import export
from streamrl.weights.manifest import describe
from streamrl.weights.store import Store, Stored, version_name

logger = logging.getLogger(__name__)

CONSUMES = ("batches",)
PRODUCES = ("policy-versions", "metrics")
POLL_S = 0.05


def main(run: RunFile, log: Log, stop: threading.Event, name: str | None = None) -> None:
    """Train until `stop` is set. `name`: another learner than the run's own; it announces under its own name and disturbs nobody."""
    learner = name or run.learner.name
    identity = f"learner-{learner}"
    writer = log.writer(identity)  # first: it fences an earlier instance; only now the announcements are final
    announced = announcements(log, learner)
    keep_compiled(run.directory / "compiled")
    start, updater, meter = origin(run), Updater(run.learner, run.batcher.rows), Meter(log, identity)
    with updater.training():
        reference = model.load(start, run.model.max_seq_len) if run.learner.kl_coefficient > 0 else None
        state = updater.initial_state(model.load(start, run.model.max_seq_len))
        trainee = Trainee(run, learner, start, updater, announced, writer, state)
        trainee.resume()
        idle_since = time.monotonic()
        for batch, offset in batches(log, trainee.position.offset, stop):
            idle_s = time.monotonic() - idle_since
            values = trainee.train(batch, offset, reference)
            meter.publish({**values, "learner/idle_s": idle_s}, step=batch.number)
            idle_since = time.monotonic()
    meter.close()
    writer.close()


@dataclass
class Trainee:
    """The policy in training, and what is announced of it."""

    run: RunFile
    learner: str
    origin: Path  # directory of the initial model
    updater: Updater
    announced: dict[int, str]  # version -> sha256
    writer: Writer
    state: TrainerState[Any]
    position: Position = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(f"{self.run.store}/{self.learner}")
        self.checkpoints = self.run.directory / "checkpoints" / self.learner
        self.vocab_size = min(len(model.load_tokenizer(self.origin)), self.state.model.Vocab.size)  # embeddings may be padded

    def resume(self) -> None:
        """Go on from the newest checkpoint, or begin: version 0 is the initial model, announced before training."""
        found = checkpoints.latest(self.checkpoints, max(self.announced, default=-1))
        if found is None:
            self.publish(0, 0, None)
            return
        self.check(found.version, found.sha256)
        self.state, self.position = checkpoints.load(self.checkpoints, found, self.state), found
        logger.info("resumed version %d at offset %d of batches; version %d is announced", found.version, found.offset, max(self.announced))

    def train(self, batch: Batch, offset: int, reference: Any) -> dict[str, float]:
        """One step, and its version. Returns the metrics. `offset`: of the record behind the batch."""
        if batch.number != self.position.version:
            missing = f"batches are missing before offset {offset}, or the checkpoint is of another run; go on under a new run name"
            raise ModelError(f"batch {batch.number} came at version {self.position.version}: {missing}")
        model.check_tokens(batch, self.vocab_size)
        self.state, measured = self.updater.step(self.state, reference, expand(batch))
        started = time.monotonic()
        self.publish(batch.number + 1, offset, batch.number)
        age = batch.number - batch.oldest_versions
        values = {**measured, "export_s": time.monotonic() - started, "batch_age_mean": float(age.mean()), "batch_age_max": float(age.max())}
        return {f"learner/{name}": value for name, value in values.items()}

    def publish(self, version: int, offset: int, batch: int | None) -> None:
        """Announce the state as `version`; one that is announced already must come out the same, and is left alone."""
        if version in self.announced:
            sha256 = self.exported_sha256()
            self.check(version, sha256)
        else:
            sha256 = self.announce(version, offset, batch).sha256
        self.position = Position(version, offset, sha256)
        if version % self.run.learner.checkpoint_every == 0:
            checkpoints.save(self.checkpoints, self.state, self.position, self.run.learner.keep_checkpoints)

    def announce(self, version: int, offset: int, batch: int | None) -> Stored:
        """Write the weights; then, in one transaction: the version exists, and the batches before `offset` are dealt with."""
        name = version_name(version)
        with self.store.writing(name, export.size_bytes(self.state.model)) as directory:
            export.save(self.state.model, self.origin, directory)
        stored = self.store.claim(name)
        told = {"probe": self.probe(version), "vocab_size": self.state.model.Vocab.size, "time_s": time.time()}
        record = PolicyVersion(learner=self.learner, version=version, batch=batch, **told, **stored._asdict())
        self.writer.commit([to_message(Output("policy-versions", self.learner, record))], {("batches", 0): offset})
        self.announced[version] = stored.sha256
        self.store.prune(version, self.run.weights.keep_versions)
        logger.info("version %d: %s", version, stored.sha256[:12])
        return stored

    def exported_sha256(self) -> str:
        """What the weights would be announced as."""
        with tempfile.TemporaryDirectory() as directory:
            export.save(self.state.model, self.origin, Path(directory))
            return describe(Path(directory)).sha256

    def check(self, version: int, sha256: str) -> None:
        if sha256 != self.announced[version]:
            raise ModelError(
                f"version {version} of {self.learner} came out as {sha256}, but {self.announced[version]} was announced: "
                "the code, the settings or the machine have changed since, or the checkpoint is of another run; go on under a new run name"
            )

    def probe(self, version: int) -> Probe:
        """Tokens drawn by the version's number from the ids of the tokenizer, with this policy's logprobs of them."""
        count = min(self.run.learner.probe_tokens, self.run.model.max_seq_len, self.run.inference.max_model_len - 1)
        tokens = np.random.default_rng(version).integers(0, self.vocab_size, count).astype(token_dtype(self.vocab_size))
        return Probe(tokens=tokens, logprobs=self.updater.logprobs(self.state.model, model.single(tokens))[0, :-1])


def announcements(log: Log, learner: str) -> dict[int, str]:
    """What this learner has announced: version -> sha256."""
    events = [to_event(m, ("policy-version",)) for m in read(log, "policy-versions", 0, log.start("policy-versions", 0))]
    return {e.record.version: e.record.sha256 for e in events if isinstance(e.record, PolicyVersion) and e.record.learner == learner}


def batches(log: Log, start: int, stop: threading.Event) -> Iterator[tuple[Batch, int]]:
    """Batches from an offset on, as they come, each with the offset behind it. Raises ModelError for one that cannot be read."""
    reader, joiner = log.reader({("batches", 0): max(start, log.start("batches", 0))}), Joiner()
    while not stop.is_set():
        for message in reader.poll(1, POLL_S):
            record = to_event(message, ("batch", "batch-part")).record
            if not isinstance(record, Batch | BatchPart):
                raise ModelError(f"batches@{message.offset} cannot be read: {record}")
            try:
                batch = joiner.add(record)
            except ValueError as error:
                raise ModelError(f"batches@{message.offset}: {error}") from None
            if batch is not None:
                yield batch, message.offset + 1
    reader.close()
