"""A learner stand-in that really writes weights to the store, and notes when each batch came.

As the real one: a store that is full ends it, and its next life goes on from its checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from streamrl.config.run_file import RunFile
from streamrl.learner.inputs import follow_batches_until
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Output, Writer
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import InputGone, VersionMismatch
from streamrl.weights.announcements import announced_hashes
from streamrl.weights.store import Store
from tests.chaos.known import trained
from tests.chaos.learner import CHECKPOINT_EVERY, Checkpoint, load, save
from tests.soak import known
from tests.soak.disk import FULL, is_full

# file in the run's directory: a line for each batch that came for the first time, with its number
# and the time (monotonic, s)
STEPS = "steps"


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Train until `stop` is set. Raises WeightError when the store is full, VersionMismatch when a
    version does not come out the same again.
    """
    file = run.directory / "checkpoint.json"
    writer = log.writer(f"learner-{run.learner.name}", "policy-versions")
    announced = announced_hashes(log, run.learner.name)
    meter = Meter(log, f"learner-{run.learner.name}")
    here = load(file)
    publish(run, writer, announced, here)
    for batch, offset in follow_batches_until(log, here.offset, stop):
        if batch.number != here.version:
            raise InputGone(f"batch {batch.number} came at version {here.version}")
        if batch.number + 1 not in announced:
            note(run, batch.number)
            stop.wait(known.ENV_STEP_S * len(run.envs))
        here = Checkpoint(here.version + 1, offset, trained(here.weights, batch))
        publish(run, writer, announced, here)
        meter.publish({"learner/rollouts": float(len(batch.uids))}, step=batch.number)
        if here.version % CHECKPOINT_EVERY == 0:
            save(file, here)
    meter.close()
    writer.close()


def publish(run: RunFile, writer: Writer, announced: dict[int, str], here: Checkpoint) -> None:
    """Write this version and announce it, if it is not announced already; then it must be
    the same.
    """
    store = Store(f"{run.store}/{run.learner.name}")

    def write(directory: Path) -> None:
        if is_full(run.directory / FULL):
            (directory / "model.safetensors").symlink_to("/dev/full")
        with (directory / "model.safetensors").open("wb") as opened:
            opened.write(known.weights(here.weights))

    if here.version in announced and here.version not in store.versions():  # pruned
        return
    stored = store.put(here.version, write, known.WEIGHTS_BYTES)
    if here.version in announced:
        if stored.sha256 != announced[here.version]:
            raise VersionMismatch(
                f"version {here.version} was announced as {announced[here.version][:12]} and now is"
                f" {stored.sha256[:12]}"
            )
        return
    batch = here.version - 1 if here.version else None
    record = PolicyVersion(
        learner=run.learner.name,
        version=here.version,
        batch=batch,
        time_s=time.time(),
        **stored._asdict(),
    )
    writer.commit([to_message(Output("policy-versions", run.learner.name, record))])
    writer.commit_offsets({("batches", 0): here.offset})
    announced[here.version] = stored.sha256
    store.prune(here.version, run.weights.keep_versions)


def note(run: RunFile, number: int) -> None:
    with (run.directory / STEPS).open("a") as steps:
        steps.write(f"{number} {time.monotonic()}\n")


def noted(directory: Path) -> Iterator[tuple[int, float]]:
    """(batch, when it first came) of each, in order; one that came to two lives counts once."""
    seen = -1
    path = directory / STEPS
    for line in path.read_text().splitlines() if path.exists() else ():
        number, time_s = line.split()
        if int(number) > seen:
            seen = int(number)
            yield seen, float(time_s)
