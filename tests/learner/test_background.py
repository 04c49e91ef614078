from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from streamrl.learner.background import Beside
from tests.support.waiting import patience


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.close()


def test_it_is_done_in_order_in_one_other_thread(beside: Beside):
    done, threads = list[int](), set[threading.Thread]()

    def work(number: int) -> None:
        done.append(number)
        threads.add(threading.current_thread())

    for number in range(100):
        beside.do(lambda number=number: work(number))
    beside.settle()
    assert (
        done == list(range(100)) and len(threads) == 1 and threading.current_thread() not in threads
    )


def test_nobody_waits_before_asking_for_it(beside: Beside):
    may = threading.Event()
    beside.do(lambda: may.wait(patience(60)))
    beside.check()
    may.set()
    beside.settle()


def test_behind_a_failure_nothing_is_done(beside: Beside):
    done = list[int]()
    beside.do(lambda: done.append(1))
    beside.do(lambda: 1 // 0)
    beside.do(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        beside.settle()
    with pytest.raises(ZeroDivisionError):
        beside.check()
    assert done == [1]


def test_what_is_under_way_ends_before_it_is_closed():
    made, done = Beside(), list[int]()
    made.do(lambda: done.append(1))
    made.close()
    assert done == [1]
