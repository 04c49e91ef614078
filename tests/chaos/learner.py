"""A learner stand-in: a checkpoint with its place in `batches`, weights that are a hash over all
batches, and the real one's way to start again.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.learner.inputs import follow_batches_until
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Output, Writer
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import InputGone, VersionMismatch
from streamrl.weights.announcements import announced_hashes
from tests.chaos import known

STEP_S = 0.1  # of training
CHECKPOINT_EVERY = 5  # versions


class Checkpoint(NamedTuple):
    """Where training stands."""

    version: int = 0
    offset: int = 0  # next record of `batches`
    weights: str = known.FIRST_WEIGHTS


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Train until `stop` is set. Raises VersionMismatch when a version that is announced does not
    come out the same again.
    """
    learner = run.learner.name
    file = run.directory / "checkpoint.json"
    writer = log.writer(f"learner-{learner}", "policy-versions")
    announced = announced_hashes(log, learner)
    here = load(file)
    publish(learner, writer, announced, here)
    for batch, offset in follow_batches_until(log, here.offset, stop):
        if batch.number != here.version:
            raise InputGone(f"batch {batch.number} came at version {here.version}")
        time.sleep(STEP_S)
        here = Checkpoint(here.version + 1, offset, known.trained(here.weights, batch))
        publish(learner, writer, announced, here)
        if here.version % CHECKPOINT_EVERY == 0:
            save(file, here)
    writer.close()


def publish(learner: str, writer: Writer, announced: dict[int, str], here: Checkpoint) -> None:
    """Announce this version, if it is not announced already; then it must be the same."""
    version = here.version
    weights = here.weights
    if version in announced:
        if announced[version] != weights:
            raise VersionMismatch(
                f"version {version} was announced as {announced[version][:12]} and now is"
                f" {weights[:12]}"
            )
        return
    record = PolicyVersion(
        learner=learner,
        version=version,
        uri="",
        size_bytes=0,
        sha256=weights,
        batch=version - 1 if version else None,
    )
    writer.commit([to_message(Output("policy-versions", learner, record))])
    writer.commit_offsets({("batches", 0): here.offset})
    announced[version] = weights


def load(file: Path) -> Checkpoint:
    return Checkpoint(**json.loads(file.read_text())) if file.exists() else Checkpoint()


def save(file: Path, checkpoint: Checkpoint) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(checkpoint._asdict()))
    part.replace(file)
