"""What a learner reads: batches, in order, each with its scores where a pool makes them, and what
it has announced itself. No JAX here: replay and fork read the same.
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
from streamrl.log.protocol import Log, Message, beginning_offset, read
from streamrl.records import Batch, PolicyVersion, Scores

logger = logging.getLogger(__name__)

VERSIONS = topology.sole_partition(topology.POLICY_VERSIONS)
BATCHES = topology.sole_partition(topology.BATCHES)
SCORES = topology.sole_partition(topology.SCORES)
T = TypeVar("T")

POLL_S = 0.05
WARN_AFTER_S = 10.0  # nobody waits silently


class TrainingInput(NamedTuple):
    """What a step is made of, and where to read on behind it."""

    batch: Batch
    offset: int  # next record of `batches`
    scores: Scores | None = None  # logprobs under the reference, where a pool computes them
    scores_offset: int = 0  # first record of `scores` that a later step may need


def follow(
    log: Log, uses_scorer_pool: bool, offset: int, scores_offset: int
) -> Iterator[TrainingInput | None]:
    """What there is to train on from these offsets on, as it comes; None for every look that finds
    nothing new. It has no end.
    """
    coming = follow_batches(log, offset)
    return (
        join_scores(coming, follow_scores(log, scores_offset))
        if uses_scorer_pool
        else (found and TrainingInput(*found) for found in coming)
    )


def read_existing(
    log: Log, uses_scorer_pool: bool, offset: int, scores_offset: int
) -> Iterator[TrainingInput]:
    """The same, but only what is there now."""
    there = read_batches(log, offset)
    taken = (
        join_scores(there, read_scores(log, scores_offset))
        if uses_scorer_pool
        else (TrainingInput(*found) for found in there)
    )
    return (found for found in taken if found is not None)


def join_scores(
    batches: Iterable[tuple[Batch, int] | None],
    scores: Iterator[tuple[Scores, int] | None],
) -> Iterator[TrainingInput | None]:
    """Each batch when its scores have come, in the order of the batches, whatever order the workers
    of the pool have finished in. Until then None.
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
    """What is found before `stop` is set."""
    while not stop.is_set():
        if (one := next(found)) is not None:
            yield one


def announced_hashes(log: Log, learner: str) -> dict[int, str]:
    """What a learner has announced: version -> sha256 of its newest lineage."""
    return {
        version: record.sha256
        for version, record in newest_lineages(read_announcements(log, learner)).items()
    }


def newest_lineages(announced: Iterable[PolicyVersion]) -> dict[int, PolicyVersion]:
    """Of several announcements of one version, the one that is valid."""
    found = dict[int, PolicyVersion]()
    for record in announced:
        known = found.get(record.version)
        if known is None or record.lineage >= known.lineage:
            found[record.version] = record
    return found


def read_announcements(log: Log, learner: str) -> Iterator[PolicyVersion]:
    """Its announcements, in order."""
    for message in read(log, *VERSIONS):
        record = to_event(message, ("policy-version",)).record
        if isinstance(record, PolicyVersion) and record.learner == learner:
            yield record


def wait_for_version(
    log: Log, learner: str, version: int, stop: threading.Event
) -> PolicyVersion | None:
    """That of a version, in its newest lineage, waited for; None when `stop` is set before."""
    if (known := newest_lineages(read_announcements(log, learner)).get(version)) is not None:
        return known
    reader = log.reader({VERSIONS: beginning_offset(log, *VERSIONS)})
    try:
        while not stop.is_set():
            for message in reader.poll(500, POLL_S):
                record = to_event(message, ("policy-version",)).record
                if isinstance(record, PolicyVersion) and (record.learner, record.version) == (
                    learner,
                    version,
                ):
                    return record
    finally:
        reader.close()


def follow_batches_until(
    log: Log, start: int, stop: threading.Event
) -> Iterator[tuple[Batch, int]]:
    """Batches from an offset on, as they come, each with the offset behind it."""
    return take_until_stopped(stop, follow_batches(log, start))


def follow_batches(log: Log, start: int) -> Generator[tuple[Batch, int] | None]:
    """The same without an end: None for every look that finds none."""
    reader = log.reader({BATCHES: max(start, beginning_offset(log, *BATCHES))})
    with closing(reader):
        while True:
            found = None
            for message in reader.poll(1, POLL_S):
                batch = _to_batch(message)
                found = None if batch is None else (batch, message.offset + 1)
            yield found


def read_batches(log: Log, start: int = 0) -> Iterator[tuple[Batch, int]]:
    """As `batches`, but only those that are there now."""
    for message in read(log, *BATCHES, max(start, beginning_offset(log, *BATCHES))):
        if (batch := _to_batch(message)) is not None:
            yield batch, message.offset + 1


def follow_scores(log: Log, start: int) -> Generator[tuple[Scores, int] | None]:
    """Records of `scores` from an offset on, as they come, each with its offset; None for every
    look that finds none. After a while it is said.
    """
    reader = log.reader({SCORES: max(start, beginning_offset(log, *SCORES))})
    with closing(reader):
        asked = time.monotonic()
        while True:
            there = [
                (scores, message.offset)
                for message in reader.poll(1, POLL_S)
                if (scores := _to_scores(message)) is not None
            ]
            yield there[0] if there else None
            if there:
                asked = time.monotonic()
            elif time.monotonic() - asked >= WARN_AFTER_S:
                logger.warning(
                    "the next batch has waited %.0f s for its scores; do all workers of the scorer pool run?",
                    WARN_AFTER_S,
                )
                asked = time.monotonic()


def read_scores(log: Log, start: int = 0) -> Iterator[tuple[Scores, int]]:
    """Those that are there now."""
    for message in read(log, *SCORES, max(start, beginning_offset(log, *SCORES))):
        if (scores := _to_scores(message)) is not None:
            yield scores, message.offset


def _to_scores(message: Message) -> Scores | None:
    record = to_event(message, ("scores",)).record
    if isinstance(record, Scores):
        return record
    logger.warning(
        "scores@%d is passed over, because it cannot be read: %s", message.offset, record
    )
    return None


def _to_batch(message: Message) -> Batch | None:
    """What cannot be read is passed over: a batch that is lost by it is missed at the next
    number.
    """
    record = to_event(message, ("batch",)).record
    if isinstance(record, Batch):
        return record
    logger.warning(
        "batches@%d is passed over, because it cannot be read: %s", message.offset, record
    )
    return None
