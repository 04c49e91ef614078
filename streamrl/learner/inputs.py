"""The learner's inputs: batches in order, each with its scores if a scorer pool makes them. This
file knows nothing of JAX; replay and fork use it too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from streamrl.config import topology
from streamrl.learner.scores import ScoreAssembler
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.records_of import follow_records, read_records
from streamrl.stream.records import Batch, Scores

logger = logging.getLogger(__name__)
T = TypeVar("T")

WARN_AFTER_S = 10.0  # A wait for scores that takes longer is logged.


class TrainingInput(NamedTuple):
    """The input of one training step, and the offsets to resume from after it."""

    batch: Batch
    offset: int  # The next record of `batches`.
    scores: Scores | None = None  # Logprobs under the reference, if a pool computes them.
    scores_offset: int = 0  # The first record of `scores` that a later step may need.


def follow(
    log: Log, needs_scores: bool, offset: int, scores_offset: int
) -> Iterator[TrainingInput | None]:
    """Training inputs from these offsets on, as they arrive. Yields None after each poll that
    completes none, and never ends.
    """
    batches = follow_batches(log, offset)
    if needs_scores:
        return join_scores(batches, follow_scores(log, scores_offset))
    return (None if item is None else TrainingInput(*item) for item in batches)


def read_existing(
    log: Log, needs_scores: bool, offset: int, scores_offset: int
) -> Iterator[TrainingInput]:
    """Like `follow`, but yields only the inputs that exist now, and ends."""
    batches = read_batches(log, offset)
    if needs_scores:
        scores = read_records(log, topology.SCORES_PARTITION, Scores, scores_offset)
        return (joined for joined in join_scores(batches, scores) if joined is not None)
    return (TrainingInput(*item) for item in batches)


def join_scores(
    batches: Iterable[tuple[Batch, int] | None],
    scores: Iterator[tuple[Scores, int] | None],
) -> Iterator[TrainingInput | None]:
    """Each batch with its scores, in the order of the batches. Scores may arrive in any order.
    Yields None whenever more scores are needed first.
    """
    assembler = ScoreAssembler()
    for item in batches:
        if item is None:
            yield None
            continue
        batch, offset = item
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


def take_until_stopped(stop: threading.Event, items: Iterator[T | None]) -> Iterator[T]:
    """The items that are not None, until `stop` is set."""
    while not stop.is_set():
        item = next(items)
        if item is not None:
            yield item


def follow_batches_until(
    log: Log, start: int, stop: threading.Event
) -> Iterator[tuple[Batch, int]]:
    """Batches from an offset on, as they arrive, until `stop` is set. Each comes with the offset
    after it.
    """
    return take_until_stopped(stop, follow_batches(log, start))


def follow_batches(log: Log, start: int) -> Iterator[tuple[Batch, int] | None]:
    """Like `read_batches`, but never ends: yields None after each poll that completes no batch."""
    for item in follow_records(log, topology.BATCHES_PARTITION, Batch, start):
        yield None if item is None else (item[0], item[1] + 1)


def read_batches(log: Log, start: int = 0) -> Iterator[tuple[Batch, int]]:
    """The batches that exist now, from an offset on. Each comes with the offset after it. One that
    cannot be read is skipped here, and reported as missing when the next one arrives.
    """
    for batch, offset in read_records(log, topology.BATCHES_PARTITION, Batch, start):
        yield batch, offset + 1


def follow_scores(log: Log, start: int) -> Iterator[tuple[Scores, int] | None]:
    """Scores from an offset on, as they arrive, each with its own offset. Yields None after each
    poll that finds none, never ends, and warns after `WARN_AFTER_S` without any.
    """
    asked = time.monotonic()
    for item in follow_records(log, topology.SCORES_PARTITION, Scores, start):
        yield item
        if item is not None:
            asked = time.monotonic()
        elif time.monotonic() - asked >= WARN_AFTER_S:
            logger.warning(
                "the next batch has waited %.0f s for its scores; do all workers of the scorer"
                " pool run?",
                WARN_AFTER_S,
            )
            asked = time.monotonic()
