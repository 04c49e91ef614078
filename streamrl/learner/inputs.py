"""The learner's inputs: batches in order, each with its scores if a scorer pool makes them, and the
versions that a learner has announced. This file knows nothing of JAX; replay and fork use it too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple, TypeVar

from streamrl.config import topology
from streamrl.learner.scores import ScoreAssembler
from streamrl.log.codec import to_event
from streamrl.log.protocol import Log, Message, beginning_offset
from streamrl.log.reading import read
from streamrl.log.records_of import SCHEMA_OF
from streamrl.records import Batch, PolicyVersion, Record, Scores

logger = logging.getLogger(__name__)

VERSIONS = topology.sole_partition(topology.POLICY_VERSIONS)
BATCHES = topology.sole_partition(topology.BATCHES)
SCORES = topology.sole_partition(topology.SCORES)
T = TypeVar("T")
R = TypeVar("R", bound=Record)

POLL_S = 0.05
WARN_AFTER_S = 10.0  # A wait for scores that takes longer is logged.


class TrainingInput(NamedTuple):
    """The input of one training step, and the offsets to resume from after it."""

    batch: Batch
    offset: int  # The next record of `batches`.
    scores: Scores | None = None  # Logprobs under the reference, if a pool computes them.
    scores_offset: int = 0  # The first record of `scores` that a later step may need.


def follow(
    log: Log, uses_scorer_pool: bool, offset: int, scores_offset: int
) -> Iterator[TrainingInput | None]:
    """Training inputs from these offsets on, as they arrive. Yields None after each poll that
    completes none, and never ends.
    """
    coming = follow_batches(log, offset)
    if uses_scorer_pool:
        return join_scores(coming, follow_scores(log, scores_offset))
    return (None if found is None else TrainingInput(*found) for found in coming)


def read_existing(
    log: Log, uses_scorer_pool: bool, offset: int, scores_offset: int
) -> Iterator[TrainingInput]:
    """Like `follow`, but yields only the inputs that exist now, and ends."""
    there = read_batches(log, offset)
    if uses_scorer_pool:
        joined = join_scores(there, read_scores(log, scores_offset))
        return (found for found in joined if found is not None)
    return (TrainingInput(*found) for found in there)


def join_scores(
    batches: Iterable[tuple[Batch, int] | None],
    scores: Iterator[tuple[Scores, int] | None],
) -> Iterator[TrainingInput | None]:
    """Each batch with its scores, in the order of the batches. Scores may arrive in any order.
    Yields None whenever more scores are needed first.
    """
    assembler = ScoreAssembler()
    for found in batches:
        if found is None:
            yield None
            continue
        batch, offset = found
        while not assembler.has(batch.number):
            try:
                scored = next(scores)
            except StopIteration:
                return
            if scored is None:
                yield None
            else:
                assembler.add(*scored)
        yield TrainingInput(batch, offset, assembler.take(batch.number), assembler.needed_from)


def take_until_stopped(stop: threading.Event, found: Iterator[T | None]) -> Iterator[T]:
    """The items that are not None, until `stop` is set."""
    while not stop.is_set():
        item = next(found)
        if item is not None:
            yield item


def announced_hashes(log: Log, learner: str) -> dict[int, str]:
    """The sha256 of each version that the learner has announced, in its newest lineage."""
    newest = newest_lineages(read_announcements(log, learner))
    return {version: record.sha256 for version, record in newest.items()}


def newest_lineages(announced: Iterable[PolicyVersion]) -> dict[int, PolicyVersion]:
    """The valid announcement of each version: the one of the newest lineage."""
    found = dict[int, PolicyVersion]()
    for record in announced:
        known = found.get(record.version)
        if known is None or record.lineage >= known.lineage:
            found[record.version] = record
    return found


def read_announcements(log: Log, learner: str) -> Iterator[PolicyVersion]:
    """All announcements of the learner, in order."""
    for message in read(log, *VERSIONS):
        record = to_event(message, ("policy-version",)).record
        if isinstance(record, PolicyVersion) and record.learner == learner:
            yield record


def wait_for_version(
    log: Log, learner: str, version: int, stop: threading.Event
) -> PolicyVersion | None:
    """Wait until the learner announces `version`, and return the announcement of the newest
    lineage. None if `stop` is set first.
    """
    known = newest_lineages(read_announcements(log, learner)).get(version)
    if known is not None:
        return known
    reader = log.reader({VERSIONS: beginning_offset(log, *VERSIONS)})
    try:
        while not stop.is_set():
            for message in reader.poll(500, POLL_S):
                record = to_event(message, ("policy-version",)).record
                if not isinstance(record, PolicyVersion):
                    continue
                if record.learner == learner and record.version == version:
                    return record
    finally:
        reader.close()


def follow_batches_until(
    log: Log, start: int, stop: threading.Event
) -> Iterator[tuple[Batch, int]]:
    """Batches from an offset on, as they arrive, until `stop` is set. Each comes with the offset
    after it.
    """
    return take_until_stopped(stop, follow_batches(log, start))


def follow_batches(log: Log, start: int) -> Generator[tuple[Batch, int] | None]:
    """Like `read_batches`, but never ends: yields None after each poll that completes no batch."""
    reader = log.reader({BATCHES: max(start, beginning_offset(log, *BATCHES))})
    with closing(reader):
        while True:
            found = None
            for message in reader.poll(1, POLL_S):
                batch = _record_in(message, Batch)
                found = None if batch is None else (batch, message.offset + 1)
            yield found


def read_batches(log: Log, start: int = 0) -> Iterator[tuple[Batch, int]]:
    """The batches that exist now, from an offset on. Each comes with the offset after it."""
    for message in read(log, *BATCHES, max(start, beginning_offset(log, *BATCHES))):
        batch = _record_in(message, Batch)
        if batch is not None:
            yield batch, message.offset + 1


def follow_scores(log: Log, start: int) -> Generator[tuple[Scores, int] | None]:
    """Scores from an offset on, as they arrive, each with its own offset. Yields None after each
    poll that finds none, never ends, and warns after `WARN_AFTER_S` without any.
    """
    reader = log.reader({SCORES: max(start, beginning_offset(log, *SCORES))})
    with closing(reader):
        asked = time.monotonic()
        while True:
            found = None
            for message in reader.poll(1, POLL_S):
                scores = _record_in(message, Scores)
                found = None if scores is None else (scores, message.offset)
            yield found
            if found is not None:
                asked = time.monotonic()
            elif time.monotonic() - asked >= WARN_AFTER_S:
                logger.warning(
                    "the next batch has waited %.0f s for its scores; do all workers of the scorer"
                    " pool run?",
                    WARN_AFTER_S,
                )
                asked = time.monotonic()


def read_scores(log: Log, start: int = 0) -> Iterator[tuple[Scores, int]]:
    """The scores that exist now, each with its own offset."""
    for message in read(log, *SCORES, max(start, beginning_offset(log, *SCORES))):
        scores = _record_in(message, Scores)
        if scores is not None:
            yield scores, message.offset


def _record_in(message: Message, kind: type[R]) -> R | None:
    """The record of that kind in a message. One that cannot be read is skipped here; a batch is
    reported as missing when the next one arrives.
    """
    record = to_event(message, (SCHEMA_OF[kind],)).record
    if isinstance(record, kind):
        return record
    logger.warning(
        "%s@%d is passed over, because it cannot be read: %s",
        message.topic,
        message.offset,
        record,
    )
    return None
