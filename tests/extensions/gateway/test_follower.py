from __future__ import annotations

import asyncio
import threading

import pytest

from streamrl.extensions.gateway.follower import CoalescedCall, Follower
from streamrl.extensions.gateway.requests import RequestRejected
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message
from tests.support.waiting import patience


async def test_who_asks_during_a_run_gets_the_result_of_the_next():
    runs: list[int] = []
    begun = threading.Event()
    goes_on = threading.Event()

    def run() -> int:
        runs.append(len(runs))
        begun.set()
        goes_on.wait(patience(20))
        return runs[-1]

    shared = CoalescedCall(run)
    first = asyncio.create_task(shared())
    await asyncio.to_thread(begun.wait, patience(20))
    later = [asyncio.create_task(shared()) for _ in range(3)]
    await asyncio.sleep(0)
    goes_on.set()
    assert await first == 0 and await asyncio.gather(*later) == [1, 1, 1]
    assert runs == [0, 1]


async def test_a_run_that_fails_fails_for_those_who_wait_and_the_next_one_works():
    results: list[int | Exception] = [KeyError("gone"), 7]

    def run() -> int:
        found = results.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    shared = CoalescedCall(run)
    with pytest.raises(KeyError):
        await shared()
    assert await shared() == 7


async def test_records_of_this_replica_are_applied_in_the_order_of_the_log_and_once():
    """Another replica has written 0 and 2, and this one 1 and 3. Their acknowledgements come in
    any order, and it reads 0 to 2 after that.
    """
    log = MemoryLog({"turns.x": 1})
    messages = [
        Message("turns.x", b"k", b"%d" % offset, partition=0, offset=offset) for offset in range(4)
    ]
    log.append(messages[:3], marker=False)
    applied: list[bytes | None] = []
    follower = Follower(log, [("turns.x", 0)], lambda some: applied.extend(m.value for m in some))
    follower.on_written(messages[3])
    follower.on_written(messages[1])
    assert applied == []
    over = threading.Event()
    reader = log.reader({("turns.x", 0): 0})
    loop = asyncio.get_running_loop()
    following = asyncio.create_task(asyncio.to_thread(follower.follow, reader, loop, over.is_set))
    async with asyncio.timeout(patience(20)):
        await follower.until(lambda: b"3" in applied)
        log.append(messages[3:], marker=False)  # it is read, and has been applied
        log.append([Message("turns.x", b"k", b"4")], marker=False)
        await follower.until(lambda: b"4" in applied)
        over.set()
        await following
    assert applied == [b"0", b"1", b"2", b"3", b"4"]


async def test_the_next_record_of_the_log_is_applied_at_once():
    applied: list[bytes | None] = []
    follower = Follower(
        MemoryLog({"turns.x": 1}),
        [("turns.x", 0)],
        lambda some: applied.extend(m.value for m in some),
    )
    waiting = asyncio.create_task(follower.until(lambda: bool(applied)))
    await asyncio.sleep(0)
    follower.on_written(Message("turns.x", b"k", b"0", partition=0, offset=0))
    follower.on_written(Message("turns.x", b"k", b"0", partition=0, offset=0))
    await waiting
    follower.on_written(Message("rewards.x", b"k", b"", partition=0, offset=0))
    assert applied == [b"0"] and follower.positions == {("turns.x", 0): 1}


async def test_a_log_that_does_not_answer_in_time_is_503():
    log = MemoryLog({"turns.x": 1})
    log.producer().send(Message("turns.x", b"k", b"not read"))
    follower = Follower(log, [("turns.x", 0)], lambda some: None)
    with pytest.raises(RequestRejected, match="has not answered within 0 s") as refused:
        await follower.catch_up(0.0)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)


async def test_what_lies_in_the_log_is_applied_before_it_counts_as_read():
    log = MemoryLog({"turns.x": 1})
    log.producer().send(Message("turns.x", b"k", b"1"))
    applied: list[bytes | None] = []
    follower = Follower(log, [("turns.x", 0)], lambda some: applied.extend(m.value for m in some))
    over = threading.Event()
    reader = log.reader({("turns.x", 0): 0})
    loop = asyncio.get_running_loop()
    following = asyncio.create_task(asyncio.to_thread(follower.follow, reader, loop, over.is_set))
    async with asyncio.timeout(patience(20)):
        await follower.catch_up(patience(20))
        assert applied == [b"1"] and follower.is_at({("turns.x", 0): 1})
        waiting = asyncio.create_task(follower.until(lambda: b"2" in applied))
        log.producer().send(Message("turns.x", b"k", b"2"))
        await waiting
        over.set()
        await following
    assert follower.positions == {("turns.x", 0): 2}
