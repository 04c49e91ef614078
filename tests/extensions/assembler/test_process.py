"""The assembler over a log: killed and started again it makes each rollout once, and a replay gives
the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.assembler import process as assembler
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.extensions.recordings.show_replay import show_replay
from streamrl.stream.log import topics
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Record, Rollout
from tests.extensions.assembler.test_session_assembler import run_of
from tests.support.data_path import publish, published
from tests.support.sessions import ENV, call, end, reward, start
from tests.support.waiting import patience, until

RUN = run_of()
ROLLOUTS = topology.rollouts(ENV)


@contextmanager
def running(log: MemoryLog, run: RunFile = RUN) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=assembler.main, args=(run, log, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(patience(20))


def send(log: MemoryLog, session: str, *records: Record) -> None:
    for record in records:
        publish(log, Output(topology.turns(ENV), session, record))


def made(log: MemoryLog, count: int) -> list[Rollout]:
    def enough() -> list[Rollout] | None:
        rollouts = published(log, ROLLOUTS, Rollout)
        return rollouts if len(rollouts) >= count else None

    return until(enough, 20, f"{count} rollouts") or []


@pytest.mark.parametrize(
    "changed",
    [{}, {"rewards": ["reward"]}, {"idle_s": 50}, {"reward_wait_s": 60}, {"max_open": 3}],
)
def test_a_restart_in_the_middle_of_sessions_loses_and_doubles_nothing(changed: dict[str, Any]):
    """Also where the rules of sessions have been changed between the two lives."""
    log = MemoryLog({t.name.removeprefix("r."): t.partitions for t in topics.plan(RUN)})
    names = [f"s{number}" for number in range(6)]
    with running(log):
        for name in names:
            send(log, name, start(name), call("a", [1], [2], session=name))
        send(log, "s0", reward("s0"), end("s0"))
        made(log, 1)
    with running(log, run_of(**changed)):
        for name in names[1:]:
            send(log, name, call("b", [3], [4], "a", session=name), end(name))
        for name in names[1:]:
            send(log, name, reward(name, 0.5))
        rollouts = made(log, len(names))
    assert sorted(each.rollout_uid for each in rollouts) == names
    assert [len(each.turns) for each in rollouts] == [2, *[4] * 5]
    (part,) = [p for p in processors_of(RUN).values() if p.name == "assembler"]
    result, _ = replay(log, part)
    assert not result.difference
    assert result.events == 29
    # A replay up to a training step has no step at which an assembler would end.
    assert show_replay(RUN, log, "assembler", 0, Console(file=StringIO())) == 0


def test_a_reward_that_comes_after_the_rollout_is_a_dead_letter_in_each_life():
    log = MemoryLog({t.name.removeprefix("r."): t.partitions for t in topics.plan(RUN)})
    letters = topology.dead_letters(topology.turns(ENV))

    def letters_are(count: int) -> bool:
        return len(list(read(log, letters, 0))) >= count

    with running(log):
        send(log, "s", start("s"), call("a", [1], [2]), reward("s"), end("s"))
        made(log, 1)
        send(log, "s", reward("s", 0.5))
        until(lambda: letters_are(1), 20, "the letter")
    for life in (2, 3):
        with running(log):
            send(log, "s", reward("s", 0.5))
            until(lambda count=life: letters_are(count), 20, "the letter")
    assert len(published(log, ROLLOUTS, Rollout)) == 1
