"""The process of a gateway: where it listens, and what it needs."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue

import pytest

from streamrl.extensions.gateway import process
from streamrl.extensions.gateway.process import main
from streamrl.stream.local_kafka import ports
from streamrl.stream.log.memory import MemoryLog
from streamrl.system.errors import ConfigError
from tests.support.gateways import ENV, TOPICS, run_of
from tests.support.waiting import patience


def test_a_replica_that_has_an_address_of_its_own_is_given_its_port(tmp_path: Path):
    """As a pod has. On one machine replica 3 would listen on gateway.port + 3."""
    (port,) = ports.choose_ports(0)[:1]
    found = Queue[str]()
    stop = threading.Event()
    arguments = (run_of(tmp_path, port=8700), MemoryLog(TOPICS), stop, 3, found.put, port)
    thread = threading.Thread(target=main, args=arguments)
    thread.start()
    try:
        assert found.get(timeout=patience(20)) == f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(patience(20))
    assert not thread.is_alive()


def test_a_run_without_sessions_has_no_gateway(tmp_path: Path):
    run = run_of(tmp_path)
    none = run.envs[ENV].model_copy(update={"sessions": None})
    with pytest.raises(ConfigError, match=r"envs\.<name>\.sessions"):
        process.check(run.model_copy(update={"envs": {ENV: none}}))


def test_a_model_whose_tool_calls_cannot_be_read_has_no_gateway(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}[TOOL_CALLS]{% endif %}")
    run = run_of(tmp_path)
    model = run.model.model_copy(update={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"Mistral.*tool_syntax"):
        process.check(run.model_copy(update={"model": model}))
