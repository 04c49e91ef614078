"""A replica that starts reads what is open, whatever turns.<env> holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.assembler import process as assembler
from streamrl.extensions.gateway import open_sessions
from streamrl.extensions.gateway.open_sessions import read_open_records
from streamrl.extensions.gateway.replica import TURN_SCHEMAS
from streamrl.stream.log import topics
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output, partitions_of
from streamrl.stream.log.reading import read
from streamrl.stream.records import Record, Rollout, SessionStart
from tests.support.data_path import publish, published
from tests.support.gateways import ENV, gateways, run_of
from tests.support.sessions import call, end, reward
from tests.support.waiting import patience, until

CLOSED = 30


def log_of(run: RunFile) -> MemoryLog:
    return MemoryLog({t.name.removeprefix("gw."): t.partitions for t in topics.plan(run)})


def start(session: str) -> SessionStart:
    return SessionStart(session=session, environment=ENV, problem_id="7")


def session(name: str, calls: int = 10) -> list[Record]:
    made = [
        call(f"{i}", [1], [2], f"{i - 1}" if i else "", session=name, request=f"{i}#0")
        for i in range(calls)
    ]
    return [start(name), *made]


def send(log: MemoryLog, name: str, records: Sequence[Record]) -> None:
    for record in records:
        publish(log, Output(topology.turns(ENV), name, record))


@contextmanager
def assembling(run: RunFile, log: MemoryLog, rollouts: int):
    """The assembler until it has made so many rollouts. It writes a snapshot as it stops."""
    stop = threading.Event()
    thread = threading.Thread(target=assembler.main, args=(run, log, stop))
    thread.start()
    try:
        yield
        topic = topology.rollouts(ENV)
        until(lambda: len(published(log, topic, Rollout)) >= rollouts, 20, "the rollouts")
    finally:
        stop.set()
        thread.join(patience(20))


def filled(run: RunFile) -> MemoryLog:
    """The log after sessions that are closed, and one that was begun before all of them."""
    log = log_of(run)
    send(log, "open", [*session("open"), start("open")])
    with assembling(run, log, CLOSED):
        for number in range(CLOSED):
            name = f"closed-{number}"
            send(log, name, [*session(name), reward(name), end(name)])
    return log


def test_only_the_records_of_open_sessions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(open_sessions, "KEPT_RECORDS", 0)
    run = run_of(tmp_path)
    log = filled(run)
    turns = partitions_of(log, [topology.turns(ENV)])
    events, offsets = read_open_records(log, turns, TURN_SCHEMAS)
    assert [type(event.record).__name__ for event in events] == [
        "SessionStart",
        *["ModelCall"] * 10,
        "SessionStart",
    ]
    assert {event.key for event in events} == {"open"}
    assert offsets == log.end_offsets(turns)


def test_without_a_snapshot_everything_is_read(tmp_path: Path):
    log = log_of(run_of(tmp_path))
    send(log, "s", session("s"))
    turns = partitions_of(log, [topology.turns(ENV)])
    assert read_open_records(log, turns, TURN_SCHEMAS) == ([], log.beginning_offsets(turns))


@pytest.mark.parametrize("kept", [0, 50])
def test_a_replica_knows_open_sessions_and_those_that_ended_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
):
    monkeypatch.setattr(open_sessions, "KEPT_RECORDS", kept)
    run = run_of(tmp_path)
    log = filled(run)
    send(log, "late", session("late"))  # after the snapshot
    with gateways(tmp_path, log=log) as gateway:
        url = gateway.start()
        opened = gateway.begin(url, "open", resume=True)
        late = gateway.begin(url, "late", resume=True)
        assert opened["session_id"] == "open" and late["session_id"] == "late"
        last = f"closed-{CLOSED - 1}"
        again = gateway.opened(url, {"session_id": last, "task_id": "7"})
        assert again.status_code == (409 if kept else 200)


def test_a_topic_that_was_made_again_is_read_from_its_beginning(tmp_path: Path):
    run = run_of(tmp_path)
    log = filled(run)
    again = log_of(run)
    for message in read(log, topology.journal("assembler"), 0):
        again.producer().send(message)
    send(again, "s", session("s"))
    turns = partitions_of(again, [topology.turns(ENV)])
    opened = read_open_records(again, turns, TURN_SCHEMAS)
    assert opened.offsets == again.beginning_offsets(turns)
