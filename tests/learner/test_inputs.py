"""Batches and the scores of a pool, put together: by hand, in lists."""

from __future__ import annotations

import logging
import threading

import pytest

from streamrl.learner.inputs import (
    TrainingInput,
    follow,
    join_scores,
    read_existing,
    take_until_stopped,
)
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Batch, Scores
from tests.support.build import floats, group
from tests.support.data_path import publish


def batch(number: int) -> Batch:
    from streamrl.batcher.assemble import assemble

    made = assemble(
        [group(name=f"g{number}", sizes=(2,))], number, number, row_count=1, max_seq_len=8
    )
    assert made is not None
    return made


def scores(number: int, *values: float, by: str = "scorer-0") -> Scores:
    return Scores(number=number, scorer=by, reference=0, logprobs=floats(*values))


def taken(*records: Scores, batches: int = 3) -> list[TrainingInput]:
    """Batches at offsets 0, 10, 20, with these records of `scores` at offsets 5, 6, 7 ..."""
    found = join_scores(
        ((batch(n), 10 * n + 1) for n in range(batches)),
        iter([(record, 5 + i) for i, record in enumerate(records)]),
    )
    return [each for each in found if each is not None]


def test_order_is_restored():
    found = taken(scores(1, -1, -1), scores(2, -2, -2), scores(0, -0.5, -0.25))
    assert [(t.batch.number, t.offset, t.scores and t.scores.number) for t in found] == [
        (0, 1, 0),
        (1, 11, 1),
        (2, 21, 2),
    ]
    # what a later step may need begins with batch 1 at 5, batch 2 at 6, behind the last
    assert [t.scores_offset for t in found] == [5, 6, 8]


def test_a_batch_without_scores_is_not_taken():
    assert [t.batch.number for t in taken(scores(0, -1, -1), scores(2, -1, -1))] == [0]
    assert taken() == []


def test_what_is_scored_twice_counts_once_and_the_first_has_it():
    found = taken(
        scores(0, -1, -1),
        scores(0, -9, -9, by="scorer-1"),
        scores(1, -2, -2),
        scores(0, -9, -9),
        scores(2, -3, -3),
    )
    assert [t.scores.logprobs.tolist() for t in found if t.scores] == [[-1, -1], [-2, -2], [-3, -3]]
    # nothing of a batch that is done is waited for
    assert [t.scores_offset for t in found] == [6, 8, 10]


def a_log() -> MemoryLog:
    return MemoryLog({"batches": 1, "scores": 1})


def test_what_was_recorded_is_taken_again():
    log = a_log()
    publish(
        log,
        *(Output("batches", str(n), batch(n)) for n in range(3)),
        *(Output("scores", str(n), scores(n, -1, -n)) for n in (1, 0)),
    )
    assert [
        (t.batch.number, t.offset, t.scores_offset) for t in read_existing(log, True, 0, 0)
    ] == [
        (0, 1, 0),
        (1, 2, 2),
    ]
    assert [
        (t.batch.number, t.scores and t.scores.logprobs.tolist())
        for t in read_existing(log, True, 1, 0)
    ] == [(1, [-1, -1])]
    assert [(t.batch.number, t.scores) for t in read_existing(log, False, 0, 0)] == [
        (0, None),
        (1, None),
        (2, None),
    ]


def test_a_learner_waits_for_scores_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    log = a_log()
    stop = threading.Event()
    publish(log, Output("batches", "0", batch(0)))
    monkeypatch.setattr("streamrl.learner.inputs.WARN_AFTER_S", 0.0)

    class Arrives(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            publish(log, Output("scores", "0", scores(0, -1, -2)))

    logging.getLogger("streamrl.learner.inputs").addHandler(handler := Arrives())
    try:
        found = next(take_until_stopped(stop, follow(log, True, 0, 0)))
    finally:
        logging.getLogger("streamrl.learner.inputs").removeHandler(handler)
    assert found.scores is not None and found.scores.logprobs.tolist() == [-1, -2]
    assert "has waited 0 s for its scores; do all workers of the scorer pool run?" in caplog.text
    stop.set()
    assert next(take_until_stopped(stop, follow(log, True, 0, 0)), None) is None


def test_while_there_is_nothing_it_says_so():
    log = a_log()
    coming = follow(log, True, 0, 0)
    assert next(coming) is None
    publish(log, Output("batches", "0", batch(0)))
    assert next(coming) is None
    publish(log, Output("scores", "0", scores(0, -1, -2)))
    assert (found := next(coming)) is not None and found.batch.number == 0
    assert next(coming) is None


def test_scores_that_cannot_be_read_are_passed_over():
    log = a_log()
    publish(log, Output("batches", "0", batch(0)))
    log.producer().send(
        to_message(Output("scores", "0", scores(0, -1, -2)))._replace(value=b"rubbish")
    )
    assert list(read_existing(log, True, 0, 0)) == []
    publish(log, Output("scores", "0", scores(0, -1, -2)))
    assert [found.batch.number for found in read_existing(log, True, 0, 0)] == [0]
