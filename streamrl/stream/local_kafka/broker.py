"""A local Apache Kafka for machines that have no cluster: one process a run, its data in
`runs/<run>/kafka` (`storage.py`).

`start` starts one, `running_address` finds one that another process started, `ensure_running` does
whichever is needed. `connect.py` knows about clusters too.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from streamrl.stream.local_kafka import storage
from streamrl.stream.local_kafka.distribution import file_lock
from streamrl.stream.local_kafka.jvm import HEAP_MB, java_command, launch, raise_from_log
from streamrl.stream.local_kafka.ports import HOST, choose_ports
from streamrl.system.errors import BrokerError, BrokerUnreachable

logger = logging.getLogger(__name__)

# measured: 1.5 s, with formatting 2-3 s; with gigabytes to recover, 10 s and more
START_LIMIT_S = 180.0  # on a busy machine; one that ends is noticed at once
STOP_LIMIT_S = 15.0  # measured: 0.2-0.4 s
# A controller that has fenced the broker by then has recorded it, 0.1 s after it is ready.
ALREADY_FENCED_S = 3.0
FENCED = re.compile(r"Fencing broker.*Replayed BrokerRegistrationChangeRecord", re.DOTALL)
READY = "Activated periodic tasks"


@dataclass(frozen=True)
class Setup:
    """What a broker has beyond server.properties, such as other listeners or an authorizer. By
    default it listens on loopback and lets in every user of this machine.
    """

    # These win over the template's, and may contain ${port} and ${controller_port}.
    properties: Mapping[str, str] = field(default_factory=dict[str, str])
    # librdkafka settings with which to ask whether the broker is up
    client: Mapping[str, Any] = field(default_factory=dict[str, Any])
    heap_mb: int = HEAP_MB


PLAIN = Setup()


@dataclass(frozen=True)
class Broker:
    """A broker process, ours or another command's."""

    directory: Path
    port: int
    controller_port: int
    process: psutil.Process

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def alive(self) -> bool:
        return _is_kafka(self.process, self.directory)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Ask the broker to shut down cleanly, and kill it after `limit_s`. Kafka keeps what it has
        acknowledged either way.
        """
        try:
            self.process.terminate()
            self.process.wait(limit_s)
        except psutil.NoSuchProcess:
            pass
        except psutil.TimeoutExpired:
            logger.warning(
                "the broker at %s (pid %d) did not stop within %.0f s: killed",
                self.address,
                self.process.pid,
                limit_s,
            )
            self.process.kill()
            self.process.wait(limit_s)


def start(
    directory: Path, port: int = 0, die_with_parent: bool = True, setup: Setup = PLAIN
) -> Broker:
    """Start a broker on `directory` and wait until it answers. A new directory is formatted first.

    `port` 0 takes the port of last time where it is free, else any. With `die_with_parent` (Linux)
    the kernel kills the broker when the calling thread ends for whatever reason. Raises BrokerError
    (one runs already, no Java, no jars, disk full), PortTaken, BrokerUnreachable.
    """
    broker, is_new = _start_or_find(directory.absolute(), port, die_with_parent, setup)
    if not is_new:
        raise BrokerError(
            f"a broker is already running on {directory} (at {broker.address}, "
            f"pid {broker.process.pid}); use it, or stop it first"
        )
    return broker


def find(directory: Path) -> Broker | None:
    """The broker that runs on `directory`, no matter which process started it. Of a cluster it is
    any that runs.
    """
    return next(filter(None, map(_find, storage.node_directories(directory))), None)


def _find(directory: Path) -> Broker | None:
    values = storage.read_broker_json(directory)
    try:
        process = psutil.Process(values["pid"])
        broker = Broker(directory.absolute(), values["port"], values["controller_port"], process)
    except (KeyError, psutil.Error):
        return None
    return broker if broker.alive() else None


def running_address(directory: Path) -> str | None:
    """Address of the broker that runs on `directory` and answers. Of a cluster it has the addresses
    of all brokers, of which one answers.
    """
    nodes = storage.node_directories(directory)
    brokers = filter(None, map(_find, nodes))
    if not any(answers(broker.address) for broker in brokers):
        return None
    return ",".join(storage.read_broker_json(node)["address"] for node in nodes)


@contextlib.contextmanager
def ensure_running(directory: Path, port: int = 0) -> Generator[str]:
    """Address of the broker on `directory`. One that had to be started for it is stopped again at
    the end.
    """
    broker, is_new = _start_or_find(directory.absolute(), port, die_with_parent=True)
    try:
        yield broker.address
    finally:
        if is_new:
            broker.stop()


def _start_or_find(
    directory: Path, port: int, die_with_parent: bool, setup: Setup = PLAIN
) -> tuple[Broker, bool]:
    """The broker of `directory`, and whether this call started it. Two commands at once do not
    start two.
    """
    with sole_starter(directory):
        broker = find(directory)
        if broker is None:
            return _start(directory, port, die_with_parent, setup), True
        wait_until_answers(broker, START_LIMIT_S, setup)
        return broker, False


@contextlib.contextmanager
def sole_starter(directory: Path) -> Generator[None]:
    """Make the directory of a run's Kafka, and let one process at a time start brokers on it.
    Raises BrokerError for an OSError, as of a disk that is full.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with file_lock(directory / ".lock"):
            yield
    except OSError as error:
        raise BrokerError(
            f"{error.filename or directory}: {error.strerror}; a broker writes its log below "
            f"{directory}: make room, or name another runs_dir"
        ) from None


def _start(directory: Path, port: int, die_with_parent: bool, setup: Setup) -> Broker:
    storage.check_free_space(directory)
    last = storage.read_broker_json(directory)
    port, controller_port = choose_ports(port, last.get("port", 0), last.get("controller_port", 0))
    command = java_command(setup.heap_mb)
    properties = setup.properties
    if not storage.is_formatted(directory):
        storage.format_data(directory, command, port, controller_port, properties)
    elif not storage.was_shut_down(directory):
        _finish_unclean_shutdown(
            directory, command, port, controller_port, die_with_parent, properties
        )
    broker = launch_on(directory, port, controller_port, die_with_parent, setup)
    try:
        wait_until_answers(broker, START_LIMIT_S, setup)
    except BaseException:
        broker.kill()
        raise
    return broker


def launch_on(
    directory: Path, port: int, controller_port: int, die_with_parent: bool, setup: Setup
) -> Broker:
    """Start the process of a broker on data that is formatted, and wait for nothing."""
    config = directory / "server.properties"
    data = directory / "data"
    storage.write_properties(config, data, port, controller_port, setup.properties)
    with storage.sole_owner(data) as owner:
        process = launch(
            [*java_command(setup.heap_mb), "kafka.Kafka", str(config)],
            storage.rotate_log(directory),
            die_with_parent,
            owner,
        )
    broker = Broker(directory, port, controller_port, process)
    values = {
        "pid": process.pid,
        "address": broker.address,
        "port": port,
        "controller_port": controller_port,
    }
    try:
        storage.write_broker_json(directory, values)
    except BaseException:
        broker.kill()
        raise
    return broker


def _finish_unclean_shutdown(
    directory: Path,
    command: list[str],
    port: int,
    controller_port: int,
    die_with_parent: bool,
    properties: Mapping[str, str],
) -> None:
    """Let a controller alone record, on disk, that the broker that was killed is dead.

    Otherwise the next broker starts as the leader of everything until its own old session expires,
    and leads nothing for a moment then. Ends of transactions that it has decided on and not yet
    written in that moment are lost: what a part has committed, its journal too, stays hidden from
    all readers, and the part that is started again does it a second time. This is KAFKA-20734, seen
    in Kafka 4.3.1 (2025); this function can go when `distribution.VERSION` has it fixed.
    """
    listener = f"CONTROLLER://{HOST}:{controller_port}"
    controller = {
        "process.roles": "controller",
        "listeners": listener,
        "advertised.listeners": listener,
        "broker.session.timeout.ms": "100",
        "broker.heartbeat.interval.ms": "50",
    }
    config = directory / "controller.properties"
    data = directory / "data"
    storage.write_properties(config, data, port, controller_port, {**properties, **controller})
    log = directory / "controller.log"
    controller_command = [*command, "-Dcontroller.level=info", "kafka.Kafka", str(config)]
    with storage.sole_owner(data) as owner:
        process = launch(controller_command, log, die_with_parent, owner)
    try:
        _wait_until_fenced(directory, process, log, port)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()  # and not killed: it writes what it has decided
        process.wait()
        config.unlink()


def _wait_until_fenced(directory: Path, process: psutil.Popen, log: Path, port: int) -> None:
    """Wait until the controller has written that the broker is fenced, or has written nothing
    for ALREADY_FENCED_S after it was ready.
    """
    deadline = time.monotonic() + START_LIMIT_S
    ready_s = float("inf")
    fenced_bytes: int | None = None  # size of the controller's log when it had decided
    while time.monotonic() < min(deadline, ready_s + ALREADY_FENCED_S):
        text = log.read_text(errors="replace")
        written_bytes = storage.metadata_bytes(directory)
        if FENCED.search(text):
            # The decision is on disk once anything more is: itself, or what the controller writes
            # twice a second, after it.
            if fenced_bytes is not None and fenced_bytes < written_bytes:
                return
            if fenced_bytes is None:
                fenced_bytes = written_bytes
            ready_s = float("inf")
        elif READY in text:
            ready_s = min(ready_s, time.monotonic())
        if process.poll() is not None:
            raise_from_log(log, port, "could not look at its last state")
        time.sleep(0.02)


def wait_until_answers(broker: Broker, limit_s: float, setup: Setup = PLAIN) -> None:
    """Wait until a broker takes work. Raises BrokerError with the reason if it ends, and
    BrokerUnreachable after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while not answers(broker.address, setup.client):
        log = broker.directory / "broker.log"
        if not broker.alive():
            raise_from_log(log, broker.port, "ended before it was ready")
        if time.monotonic() > deadline:
            raise BrokerUnreachable(
                f"the broker (pid {broker.process.pid}) does not answer at {broker.address} "
                f"for {limit_s:.0f} s; see {log}"
            )
        time.sleep(0.05)


def answers(address: str, client: Mapping[str, Any] = PLAIN.client) -> bool:
    """Whether a broker at `address` answers, and counts itself as one that takes work. `client` may
    name another of its listeners.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    host, port = address.split(":")
    settings = {"bootstrap.servers": address, "log_level": 0, **client}
    try:
        # While no broker listens, librdkafka would only wait and complain.
        socket.create_connection((host, int(port)), 0.5).close()
        return bool(AdminClient(settings).list_topics(timeout=2).brokers)
    except (OSError, KafkaException):
        return False


def _is_kafka(process: psutil.Process, directory: Path) -> bool:
    """Whether this is still the same process, and a broker on that directory: the kernel uses
    numbers of processes again. One that has ended and was not waited for is none.
    """
    expected = ["kafka.Kafka", str(directory / "server.properties")]
    try:
        return process.is_running() and process.cmdline()[-2:] == expected
    except psutil.Error:
        return False
