"""Which Kafka a run uses: a cluster that is named, or the local broker of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.stream.local_kafka import broker, connect
from streamrl.system.errors import BrokerError, BrokerUnreachable, ConfigError
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


def test_an_administrators_file_is_read_as_kafkas_commands_read_it(tmp_path: Path):
    file = tmp_path / "admin.properties"
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required"
    file.write_text(
        "# of the cluster\n"
        "bootstrap.servers=kafka.example:9093\n"
        "security.protocol = SASL_SSL\n"
        "sasl.mechanism=SCRAM-SHA-512\n"
        f'sasl.jaas.config={login} \\\n  username="x" password="y";\n'
    )
    assert connect.properties_file(file) == {
        "bootstrap.servers": "kafka.example:9093",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "x",
        "sasl.password": "y",
    }
    file.write_text("bootstrap.servers=a:1\nssl.truststore.type=PEM\nssl.truststore.location=/ca")
    assert connect.properties_file(file) == {"bootstrap.servers": "a:1", "ssl.ca.location": "/ca"}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("security.protocol=SSL", "it has no bootstrap.servers"),
        ("bootstrap.servers", r"admin\.properties:1: give name=value"),
        (
            "bootstrap.servers=kafka:1\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN",
            "PLAIN without TLS sends the password in clear to kafka:1",
        ),
    ],
)
def test_an_administrators_file_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, cause: str
):
    file = tmp_path / "admin.properties"
    file.write_text(text)
    with pytest.raises(ConfigError, match=cause):
        connect.properties_file(file)
    with pytest.raises(ConfigError, match="it cannot be read"):
        connect.properties_file(tmp_path / "nowhere")


def test_no_password_goes_in_clear_to_the_cluster_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = "security.protocol: SASL_PLAINTEXT, sasl.mechanism: PLAIN"
    monkeypatch.setenv("STREAMRL_KAFKA", f"{{bootstrap.servers: 'kafka:1', {plain}}}")
    with pytest.raises(ConfigError, match="set security.protocol to SASL_SSL"):
        connect.cluster_settings(run_in(tmp_path))
