"""What is known of a part from its answers, or their absence, at /livez: of `health.py`, and of a
listener that is deaf.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring import pages
from streamrl.run.monitoring.http import serving
from streamrl.run.monitoring.targets import targets_file
from streamrl.run.orchestrator import liveness
from streamrl.run.orchestrator.liveness import BrokerWatch, Liveness, ProbeState, ask, listening
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message
from streamrl.system.errors import BrokerUnreachable
from tests.support.waiting import patience, until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setattr(pages, "LIVE_WITHIN_S", 0.2)
    return parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
        }
    )


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=patience(0.2), trust_env=False) as made:
        yield made


def test_a_part_whose_loop_stands_hangs(run: RunFile, client: httpx.Client):
    log = MemoryLog({"in": 1})
    with serving(run, log, "buffer") as watched:
        until(lambda: listening(targets_file(run, "buffer")) != "")
        reader = watched.reader({("in", 0): 0})
        life = ProbeState()

        def asked() -> str:
            ask(client, listening(targets_file(run, "buffer")), life, 5.0, 60.0)
            return life.hangs

        def turning() -> str:
            reader.poll(1, 0.0)
            return asked()

        until(lambda: turning() == "")  # at once, where the machine answers within the 0.2 s
        until(lambda: asked().startswith("buffer: its loop last ran "))
        until(lambda: turning() == "")


def test_a_part_that_holds_its_interpreter_hangs_after_its_limit(client: httpx.Client):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        life = ProbeState()
        ask(client, address, life, 5.0, 8.0)
        assert life.hangs == ""
        ask(client, address, life, 5.0, 8.0)
        assert (
            life.hangs
            == f"it has not answered at http://{address}/livez for 10 s, the limit is 8 s"
        )


def test_a_new_life_is_not_judged_by_the_last_one(run: RunFile):
    liveness = Liveness(run, topology.identities(run))
    note = targets_file(run, "learner-lead")
    note.parent.mkdir(parents=True)
    note.write_text('[{"targets": ["127.0.0.1:1"]}]')
    liveness.lives["learner"].hangs = "it hung"
    assert liveness.hanging() == {"learner": "it hung"} and listening(note) == "127.0.0.1:1"
    liveness.on_start("learner")
    assert liveness.hanging() == {} and listening(note) == ""


def test_a_part_that_is_ready_has_progressed_once_it_has_committed_a_transaction(
    run: RunFile, client: httpx.Client
):
    log = MemoryLog({"out": 1})
    with serving(run, log, "buffer") as watched:
        address = until(lambda: listening(targets_file(run, "buffer")))
        life = ProbeState()

        def asked() -> bool:
            ask(client, address, life, 5.0, 60.0)
            return life.has_progressed

        writer = watched.writer("buffer")
        writer.commit([Message("out", b"k", b"its claim, or what it has to write at its start")])
        watched.mark_ready()
        assert not asked()
        writer.commit([Message("out", b"k", b"its first step")])
        until(asked)


def test_a_broker_answers_or_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "PERIOD_S", 0.01)
    log = MemoryLog({})
    with BrokerWatch(log) as watch:
        until(lambda: watch.answers)

        def away(self: MemoryLog) -> dict[str, int]:
            raise BrokerUnreachable("no Kafka broker answers")

        monkeypatch.setattr(MemoryLog, "topics", away)
        until(lambda: not watch.answers)
