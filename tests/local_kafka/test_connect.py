"""Which Kafka a run uses: a cluster that is named, or the local broker of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.errors import BrokerError, BrokerUnreachable, ConfigError
from streamrl.local_kafka import broker, connect
from tests.support.kafka import topics_at
from tests.support.waiting import until


def run_in(directory: Path, **kafka: str) -> RunFile:
    return run_file.parse(
        {"run": "r", "runs_dir": str(directory), "kafka": kafka, "envs": {"e": {"fraction": 1.0}}}
    )


def test_in_the_foreground_it_ends_when_asked_and_says_so_when_it_ends_by_itself(
    directory: Path, tmp_path: Path
):
    run = run_in(tmp_path)
    home = connect.broker_dir(run)
    home.parent.mkdir()
    directory.rename(home)

    stop = threading.Event()
    thread = threading.Thread(target=connect.serve, args=(run, stop))
    thread.start()
    until(lambda: broker.running_address(home))
    assert connect.client_settings(run) == {"bootstrap.servers": broker.running_address(home)}
    stop.set()
    thread.join()
    assert broker.find(home) is None
    with pytest.raises(BrokerUnreachable, match="streamrl broker RUN.yaml"):
        connect.client_settings(run)

    class Killing(threading.Event):
        """As if somebody killed the broker while the command waits."""

        def wait(self, timeout: float | None = None) -> bool:
            if found := broker.find(home):
                found.process.kill()
            return super().wait(timeout)

    with pytest.raises(BrokerError, match="stopped by itself"):
        connect.serve(run, Killing())

    # a stopped run's broker comes back for a command, and goes again
    with connect.connect_or_start(run) as settings:
        assert topics_at(settings["bootstrap.servers"]) >= {"kept"}
    assert broker.find(home) is None


def test_an_existing_cluster_is_used_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_in(tmp_path, **{"bootstrap.servers": "a:1", "client.rack": "x"})
    assert connect.client_settings(run) == {"bootstrap.servers": "a:1", "client.rack": "x"}
    monkeypatch.setenv("STREAMRL_KAFKA", "b:2,c:3")
    assert connect.client_settings(run) == {"bootstrap.servers": "b:2,c:3", "client.rack": "x"}
    monkeypatch.setenv("STREAMRL_KAFKA", "{bootstrap.servers: 'd:4', security.protocol: SSL}")
    assert connect.client_settings(run) == {
        "bootstrap.servers": "d:4",
        "client.rack": "x",
        "security.protocol": "SSL",
    }
    with connect.connect_or_start(run) as settings:
        assert settings["bootstrap.servers"] == "d:4"
    with pytest.raises(ConfigError, match="no broker to start"):
        connect.serve(run, threading.Event())
    monkeypatch.setenv("STREAMRL_KAFKA", "{bootstrap.servers")
    with pytest.raises(ConfigError, match="STREAMRL_KAFKA"):
        connect.client_settings(run)


def test_a_run_that_never_had_a_broker_gets_none_by_being_looked_at(tmp_path: Path):
    with (
        pytest.raises(BrokerUnreachable, match="no broker is running for run 'r'"),
        connect.connect_or_start(run_in(tmp_path)),
    ):
        pass
