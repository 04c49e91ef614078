from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.learner.initial import tiny_tokenizer
from streamrl.run.orchestrator import preparation
from streamrl.run.orchestrator.plan import BROKER
from streamrl.run.orchestrator.preparation import (
    ensure_broker,
    has_data,
    prepare_topics,
    publish_config,
    wait_for_topics,
    warn_of_end_of_turn,
)
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.records import RunConfig
from streamrl.system.errors import BrokerUnreachable, StreamrlError
from tests.run.orchestrator.test_parts import Said
from tests.support.data_path import announce, published
from tests.support.waiting import until

STAYS = "import signal; signal.pause()"


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"copy": {}}})


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs")
    yield made
    made.close()


def brokers(monkeypatch: pytest.MonkeyPatch, program: str, *addresses: str | None) -> None:
    """The broker's command is this program, and it is running at these addresses in turn."""
    left = [*addresses]
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(preparation, "POLL_S", 0.01)
    monkeypatch.setattr(preparation, "command", lambda *_: command)
    monkeypatch.setattr(broker, "running_address", lambda _: left.pop(0) if left else None)


def test_a_cluster_that_the_run_names_needs_no_broker(run: RunFile, supervisor: Supervisor):
    named = run.model_copy(update={"kafka": {"bootstrap.servers": "b:1"}})
    assert ensure_broker(named, supervisor, Said(), threading.Event())
    assert not supervisor.has(BROKER)


def test_a_broker_is_started_and_waited_for(
    run: RunFile, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
):
    brokers(monkeypatch, STAYS, None, None, "127.0.0.1:9")
    monkeypatch.setattr(preparation, "WAITING_LINE_S", 0.0)
    said = Said()
    assert ensure_broker(run, supervisor, said, threading.Event())
    assert said.lines[0].startswith("waiting 0 s for the broker: ")
    assert "at 127.0.0.1:9 after" in said.lines[-1]


def test_a_broker_that_ends_is_quoted(
    run: RunFile, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
):
    brokers(monkeypatch, "print('no java')")
    with pytest.raises(StreamrlError, match="the broker did not start: .*log: .*broker.log"):
        ensure_broker(run, supervisor, Said(), threading.Event())


def test_whoever_stops_the_run_does_not_wait_for_its_broker(
    run: RunFile, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
):
    brokers(monkeypatch, STAYS)
    stop = threading.Event()
    stop.set()
    assert not ensure_broker(run, supervisor, Said(), stop)


def test_a_run_of_that_name_that_has_begun_is_not_written_over(run: RunFile):
    log = MemoryLog({"config": 1, "policy-versions": 1})
    assert not has_data(log) and not has_data(MemoryLog({}))
    announce(log, 0)
    assert has_data(log)
    with pytest.raises(StreamrlError, match="--resume.*--set run=NAME.*streamrl topics delete"):
        prepare_topics(run, log, resume=False, display=Said())


def test_the_run_file_is_published_as_resolved(run: RunFile):
    log = MemoryLog({"config": 1})
    publish_config(run, log)
    [record] = published(log, "config", RunConfig)
    assert (record.run, record.text) == ("r", run.to_json())
    assert has_data(log)


def test_a_template_that_ends_with_a_token_that_servers_ignore_is_shown(tmp_path: Path):
    tokenizer = tiny_tokenizer("0123456789")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    named = {"run": "r", "envs": {"copy": {}}, "model": {"path": str(tmp_path)}}
    display = Said()
    warn_of_end_of_turn(parse({"run": "r", "envs": {"copy": {}}}), display)
    warn_of_end_of_turn(parse(named), display)
    assert display.lines == []
    tokenizer.chat_template = "{{ messages[-1].content }}<bos>"
    tokenizer.save_pretrained(tmp_path)
    warn_of_end_of_turn(parse(named), display)
    assert display.lines == [
        f"warning: model directory {tmp_path}: its chat template ends an answer with '<bos>' (1),"
        " and servers stop at 2 alone, so answers may run on to max_tokens; add 1 to eos_token_id"
        " in generation_config.json"
    ]


def test_a_further_machine_waits_for_the_topics_of_the_run(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preparation, "POLL_S", 0.01)
    monkeypatch.setattr(preparation, "WAITING_LINE_S", 0.0)
    log = MemoryLog({"config": 1})
    said = Said()
    stop = threading.Event()
    answers = list[bool]()
    waiting = threading.Thread(target=lambda: answers.append(wait_for_topics(log, said, stop)))
    waiting.start()
    until(lambda: any("for the topics of the run" in line for line in said.lines))
    assert answers == []
    publish_config(run, log)
    waiting.join()
    stop.set()
    assert answers == [True] and not wait_for_topics(MemoryLog({}), said, stop)


def test_a_broker_that_has_no_answer_is_waited_for_and_named():
    class Away(MemoryLog):
        def topics(self) -> dict[str, int]:
            raise BrokerUnreachable("no broker answers at kafka:9092")

    said = Said()
    stop = threading.Event()
    answers = list[bool]()
    log = Away({})
    waiting = threading.Thread(target=lambda: answers.append(wait_for_topics(log, said, stop)))
    waiting.start()
    until(lambda: any("topics of the run: no broker answers" in line for line in said.lines))
    stop.set()
    waiting.join()
    assert answers == [False]
