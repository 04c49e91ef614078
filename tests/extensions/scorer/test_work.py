"""Which batches each worker of a pool scores, over a log in memory."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.scorer.work import check_worker, follow_work, resume_point
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Scores
from streamrl.system.errors import ConfigError
from tests.learner.test_process import batch, send
from tests.support.data_path import publish

RUN = parse(
    {
        "run": "small",
        "envs": {"copy": {}},
        "learner": {"kl": {"reference": {"by": "pool"}}},
        "scorer": {"replicas": 2},
    }
)


def a_log(batches: int, scored: tuple[int, ...] = ()) -> MemoryLog:
    log = MemoryLog({"policy-versions": 1, "batches": 1, "scores": 1})
    send(log, *(batch(number) for number in range(batches)))
    for number in scored:
        record = Scores(
            number=number,
            scorer="scorer-0",
            reference=0,
            logprobs=np.zeros(6, np.float32),
        )
        publish(log, Output("scores", str(number), record))
    return log


def dealt_with(log: MemoryLog, batches: int, scores: int) -> None:
    """The lead learner has trained on so many batches."""
    log.writer("learner-lead").commit_offsets({("batches", 0): batches, ("scores", 0): scores})


def numbers(run: RunFile, log: MemoryLog, worker: int, count: int) -> list[tuple[int, int]]:
    """The first batches of a worker, and the offsets after them."""
    found = follow_work(run, log, worker, threading.Event())
    return [(one.number, offset) for one, offset in islice(found, count)]


def test_each_worker_has_every_nth_batch():
    log = a_log(6)
    assert numbers(RUN, log, 0, 3) == [(0, 1), (2, 3), (4, 5)]
    assert numbers(RUN, log, 1, 3) == [(1, 2), (3, 4), (5, 6)]


def test_what_is_scored_or_trained_on_is_left_out():
    log = a_log(8, scored=(2, 0))
    assert numbers(RUN, log, 0, 2) == [(4, 5), (6, 7)]
    dealt_with(log, batches=5, scores=2)
    start, scored = resume_point(RUN, log)
    assert start == 5 and not scored.has(2)
    assert numbers(RUN, log, 0, 1) == [(6, 7)]


def test_it_ends_when_it_is_to_stop():
    stop = threading.Event()
    stop.set()
    assert list(follow_work(RUN, a_log(2), 0, stop)) == []


def test_a_worker_without_work_is_refused():
    check_worker(RUN, 1)
    with pytest.raises(ConfigError, match="^--index 2: scorer.replicas is 2, so the last"):
        check_worker(RUN, 2)
    alone = parse({"run": "small", "envs": {"copy": {}}})
    with pytest.raises(ConfigError, match="^neither learner.kl.reference.by is pool nor"):
        check_worker(alone, 0)
