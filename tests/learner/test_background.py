from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from streamrl.learner.background import BackgroundWorker
from tests.support.waiting import patience


@pytest.fixture
def worker() -> Iterator[BackgroundWorker]:
    made = BackgroundWorker()
    yield made
    made.close()


def test_it_is_done_in_order_in_one_other_thread(worker: BackgroundWorker):
    done = list[int]()
    threads = set[threading.Thread]()

    def work(number: int) -> None:
        done.append(number)
        threads.add(threading.current_thread())

    for number in range(100):
        worker.submit(lambda number=number: work(number))
    worker.wait()
    assert (
        done == list(range(100)) and len(threads) == 1 and threading.current_thread() not in threads
    )


def test_nobody_waits_before_asking_for_it(worker: BackgroundWorker):
    may = threading.Event()
    worker.submit(lambda: may.wait(patience(60)))
    worker.raise_if_failed()
    may.set()
    worker.wait()


def test_behind_a_failure_nothing_is_done(worker: BackgroundWorker):
    done = list[int]()
    worker.submit(lambda: done.append(1))
    worker.submit(lambda: 1 // 0)
    worker.submit(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        worker.wait()
    with pytest.raises(ZeroDivisionError):
        worker.raise_if_failed()
    assert done == [1]


def test_what_is_under_way_ends_before_it_is_closed():
    made = BackgroundWorker()
    done = list[int]()
    made.submit(lambda: done.append(1))
    made.close()
    assert done == [1]
