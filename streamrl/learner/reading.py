"""What a learner reads: batches, in order, and what it has announced itself. No JAX here: replay and fork read the same."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing

from streamrl.batcher.parts import Joiner
from streamrl.errors import ModelError
from streamrl.records import Batch, BatchPart, PolicyVersion
from streamrl.stream.codec import to_event
from streamrl.stream.log import Log, Message, read

POLL_S = 0.05


def announcements(log: Log, learner: str) -> dict[int, str]:
    """What a learner has announced: version -> sha256."""
    return {version.version: version.sha256 for version in versions(log, learner)}


def versions(log: Log, learner: str) -> Iterator[PolicyVersion]:
    """Its announcements, in order."""
    for message in read(log, "policy-versions", 0, log.start("policy-versions", 0)):
        record = to_event(message, ("policy-version",)).record
        if isinstance(record, PolicyVersion) and record.learner == learner:
            yield record


def batches(log: Log, start: int, stop: threading.Event) -> Iterator[tuple[Batch, int]]:
    """Batches from an offset on, as they come, each with the offset behind it. Raises ModelError for one that cannot be read."""
    with closing(polled(log, start)) as found:
        while not stop.is_set():
            if (batch := next(found)) is not None:
                yield batch


def polled(log: Log, start: int) -> Generator[tuple[Batch, int] | None]:
    """The same without an end: None for every poll that completes none."""
    reader, joiner = log.reader({("batches", 0): max(start, log.start("batches", 0))}), Joiner()
    with closing(reader):
        while True:
            complete = [(batch, m.offset + 1) for m in reader.poll(1, POLL_S) if (batch := _joined(joiner, m)) is not None]
            yield complete[0] if complete else None  # of one message there is at most one


def recorded(log: Log, start: int = 0) -> Iterator[tuple[Batch, int]]:
    """As `batches`, but only those that are there now."""
    joiner = Joiner()
    for message in read(log, "batches", 0, max(start, log.start("batches", 0))):
        if (batch := _joined(joiner, message)) is not None:
            yield batch, message.offset + 1


def _joined(joiner: Joiner, message: Message) -> Batch | None:
    record = to_event(message, ("batch", "batch-part")).record
    if not isinstance(record, Batch | BatchPart):
        raise ModelError(f"batches@{message.offset} cannot be read: {record}")
    try:
        return joiner.add(record)
    except ValueError as error:
        raise ModelError(f"batches@{message.offset}: {error}") from None
