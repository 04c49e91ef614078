"""A local Apache Kafka for machines that have no cluster: one process a run, its data in the run's
directory.

    runs/<run>/kafka/     data/ (the log itself), broker.json (who runs on it, and where), server.properties, broker.log

`start` makes one, `running` finds one that somebody else made, `ensure` does whichever is needed,
`reach` knows about clusters too.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, NoReturn

import psutil
import yaml

from streamrl.config.run_file import RunFile
from streamrl.config.secrets import reveal_all
from streamrl.errors import BrokerError, BrokerUnreachable, ConfigError, PortTaken, StreamrlError
from streamrl.local_kafka.distribution import FILES, VERSION, jars, java, locked

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Below the ports that the kernel hands out for outgoing connections: a client that knocks on the
# port of a broker that is down could be given that very port as its own end, connect to itself, and
# keep the broker from coming back.
PORTS = range(20_000, 32_000)
# Stopped at its first compiler it would start in 1.5 s instead of 2, and take a third more CPU for
# good.
JVM = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC")
# measured: 1.5 s, with formatting 2-3 s; with gigabytes to recover, 10 s and more
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0  # measured: 0.2-0.4 s
DYING_S = 3.0  # a broker that was killed has no command line any more when it still holds its files
CLEAN = ".kafka_cleanshutdown"  # what a broker that was not killed leaves in its data
# a controller that has said nothing for so long has nothing to say; measured: it does so 0.1 s
# after it is ready
ALREADY_FENCED_S = 3.0
FENCED = re.compile(r"Fencing broker.*Replayed BrokerRegistrationChangeRecord", re.DOTALL)
LEAST_DISK_BYTES = 256 * 1024 * 1024
PR_SET_PDEATHSIG = 1  # linux/prctl.h


# ---- a run's broker ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a broker has beyond server.properties: other listeners, an authorizer. By default:
    loopback, and whoever is on this machine.
    """

    # win over the template's; may say ${port} and ${controller_port}
    properties: Mapping[str, str] = field(default_factory=dict[str, str])
    # librdkafka settings with which to ask whether it is up
    client: Mapping[str, Any] = field(default_factory=dict[str, Any])


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

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Ask it to shut down cleanly; kill it after `limit_s`. Kafka keeps what it has
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
    """Start a broker on `directory` and wait until it answers; format the directory first if it is
    new.

    `port` 0 takes the one of last time where it is free, else any. With `die_with_parent` (Linux)
    the kernel kills the broker when the calling thread ends for whatever reason. Raises BrokerError
    (one runs already, no Java, no jars, disk full), PortTaken, BrokerUnreachable.
    """
    broker, is_new = _start_or_find(directory.absolute(), port, die_with_parent, setup)
    if not is_new:
        raise BrokerError(
            f"a broker is already running on {directory} (at {broker.address}, pid {broker.process.pid}); use it, or stop it first"
        )
    return broker


def find(directory: Path) -> Broker | None:
    """The broker that runs on `directory`, whoever started it."""
    noted = _noted(directory)
    try:
        process = psutil.Process(noted["pid"])
        broker = Broker(directory.absolute(), noted["port"], noted["controller_port"], process)
    except (KeyError, psutil.Error):
        return None
    return broker if broker.alive() else None


def running(directory: Path) -> str | None:
    """Address of the broker that runs on `directory` and answers."""
    broker = find(directory)
    return broker.address if broker and _answers(broker.address) else None


@contextlib.contextmanager
def ensure(directory: Path, port: int = 0) -> Generator[str]:
    """Address of the broker on `directory`; one that had to be started for it is stopped again at
    the end.
    """
    broker, is_new = _start_or_find(directory.absolute(), port, die_with_parent=True)
    try:
        yield broker.address
    finally:
        if is_new:
            broker.stop()


# ---- a run's Kafka, local or not -----------------------------------------------------------------


def home_of(run: RunFile) -> Path:
    """Where the run's local broker lives."""
    return run.directory / "kafka"


def cluster(run: RunFile) -> dict[str, Any]:
    """librdkafka settings of the cluster that STREAMRL_KAFKA or else the run file names; without
    `bootstrap.servers` it is the local broker.

    STREAMRL_KAFKA is `host:port[,host:port]`, or a YAML map of settings (`{bootstrap.servers: ...,
    security.protocol: SASL_SSL, ...}`). What says `env:NAME` is looked up here: the settings
    returned hold secrets, and are for clients only.
    """
    text = os.environ.get("STREAMRL_KAFKA", "")
    try:
        named = (
            yaml.safe_load(text)
            if text.lstrip().startswith("{")
            else {"bootstrap.servers": text}
            if text
            else {}
        )
    except yaml.YAMLError:
        raise ConfigError(
            "STREAMRL_KAFKA: not host:port and not a map like '{bootstrap.servers: host:port, security.protocol: SSL}'"
        ) from None
    return reveal_all({**run.kafka, **named}, "kafka")


def settings(run: RunFile) -> dict[str, Any]:
    """librdkafka settings to reach the run's Kafka. Raises BrokerUnreachable when it is a local one
    that is not running.
    """
    named = cluster(run)
    if "bootstrap.servers" in named:
        return named
    address = running(home_of(run))
    if address is None:
        raise BrokerUnreachable(
            f"no broker is running for run {run.run!r} ({home_of(run)}); start one with `streamrl broker RUN.yaml` or name yours in STREAMRL_KAFKA"
        )
    return {**named, "bootstrap.servers": address}


@contextlib.contextmanager
def reach(run: RunFile, make: bool = False) -> Generator[dict[str, Any]]:
    """As `settings`; a run whose broker is stopped gets it back on its data while the block lasts.
    With `make`, so does one that never had any.
    """
    named, directory = cluster(run), home_of(run)
    if "bootstrap.servers" in named or not (make or _is_formatted(directory)):
        yield settings(run)
        return
    with ensure(directory) as address:
        yield {**named, "bootstrap.servers": address}


def main(run: RunFile, stop: threading.Event, port: int = 0) -> None:
    """Be the run's broker until `stop` is set."""
    named = cluster(run).get("bootstrap.servers")
    if named:
        raise ConfigError(
            f"the run uses the cluster at {named} (run file or STREAMRL_KAFKA): there is no broker to start"
        )
    broker = start(home_of(run), port)
    logger.info(
        "Kafka %s at %s, pid %d, data in %s",
        VERSION,
        broker.address,
        broker.process.pid,
        broker.directory,
    )
    try:
        while not stop.wait(0.2):
            if not broker.alive():
                _explain(broker.directory / "broker.log", broker.port, "stopped by itself")
    finally:
        broker.stop()


# ---- starting ------------------------------------------------------------------------------------


def _start_or_find(
    directory: Path, port: int, die_with_parent: bool, setup: Setup = PLAIN
) -> tuple[Broker, bool]:
    """The broker of `directory`, and whether this call started it. Two commands at once do not
    start two.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / ".lock"):
            broker = find(directory)
            if broker is None:
                return _start(directory, port, die_with_parent, setup), True
            _wait_until_answers(broker, START_LIMIT_S, setup)
            return broker, False
    except OSError as error:
        raise BrokerError(
            f"{error.filename or directory}: {error.strerror}; a broker writes its log below {directory}: make room, or name another runs_dir"
        ) from None


def _start(directory: Path, port: int, die_with_parent: bool, setup: Setup) -> Broker:
    _check_disk(directory)
    command = [
        java(),
        *JVM,
        f"-Dlog4j2.configurationFile={FILES / 'log4j2.properties'}",
        "-cp",
        f"{jars()}/*",
    ]
    port, controller_port = _ports(directory, port)
    if not _is_formatted(directory):
        _format(directory, command, port, controller_port, setup)
    elif not (directory / "data" / CLEAN).exists():
        _end_last_life(directory, command, port, controller_port, die_with_parent, setup)
    properties = _write_properties(
        directory / "server.properties", directory / "data", port, controller_port, setup
    )
    process = _launch(
        [*command, "kafka.Kafka", str(properties)], directory, _new_log(directory), die_with_parent
    )
    broker = Broker(directory, port, controller_port, process)
    try:
        note = {
            "pid": process.pid,
            "address": broker.address,
            "port": port,
            "controller_port": controller_port,
        }
        _write(directory / "broker.json", json.dumps(note))
        _wait_until_answers(broker, START_LIMIT_S, setup)
    except BaseException:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()
        raise
    return broker


def _launch(command: list[str], directory: Path, log: Path, die_with_parent: bool) -> psutil.Popen:
    with log.open("wb") as file, _sole_owner(directory / "data") as owner:
        return psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[owner],
            start_new_session=True,  # Ctrl-C in the terminal is for us; the broker stops last
            preexec_fn=_dying_with(os.getpid())
            if die_with_parent and sys.platform == "linux"
            else None,
        )


def _end_last_life(
    directory: Path,
    command: list[str],
    port: int,
    controller_port: int,
    die_with_parent: bool,
    setup: Setup,
) -> None:
    """Let a controller alone take note, on disk, that the broker that was killed is dead.

    Else the next one starts as leader of everything until its own old session is over, and is
    nobody's leader for a moment then. Ends of transactions that it has decided on and not yet
    written in that moment are dropped for ever (Kafka 4.3, KAFKA-20734): what a part has committed,
    its journal too, stays hidden from all readers, and the part that is started again does it a
    second time.
    """
    alone = f"CONTROLLER://{HOST}:{controller_port}"
    own = {"process.roles": "controller", "listeners": alone, "advertised.listeners": alone}
    sessions = {"broker.session.timeout.ms": "100", "broker.heartbeat.interval.ms": "50"}
    properties = _write_properties(
        directory / "controller.properties",
        directory / "data",
        port,
        controller_port,
        Setup({**setup.properties, **own, **sessions}),
    )
    log = directory / "controller.log"
    process = _launch(
        [command[0], "-Dcontroller.level=info", *command[1:], "kafka.Kafka", str(properties)],
        directory,
        log,
        die_with_parent,
    )
    deadline, active_s, decided_bytes = time.monotonic() + START_LIMIT_S, float("inf"), -1
    try:
        while time.monotonic() < min(deadline, active_s + ALREADY_FENCED_S):
            text, written_bytes = log.read_text(errors="replace"), _metadata_bytes(directory)
            if FENCED.search(text):
                # by that, or by what it writes twice a second: then that lies before it
                if 0 <= decided_bytes < written_bytes:
                    return
                active_s, decided_bytes = (
                    float("inf"),
                    decided_bytes if decided_bytes >= 0 else written_bytes,
                )
            elif "Activated periodic tasks" in text:
                active_s = min(active_s, time.monotonic())
            if process.poll() is not None:
                _explain(log, port, "could not look at its last state")
            time.sleep(0.02)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()  # and not killed: it writes what it has decided
        process.wait()
        properties.unlink()


def _metadata_bytes(directory: Path) -> int:
    """What the controller has written of its decisions."""
    return sum(
        path.stat().st_size for path in (directory / "data" / "__cluster_metadata-0").glob("*.log")
    )


@contextlib.contextmanager
def _sole_owner(data: Path) -> Generator[int]:
    """A lock that whoever inherits this file descriptor holds as long as it lives. Kafka's own
    comes too late: a second one has written by then.
    """
    deadline = time.monotonic() + DYING_S
    with (data / ".owner").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BrokerError(f"another broker works in {data}; stop it first") from None
                time.sleep(0.02)
        yield file.fileno()


def _new_log(directory: Path) -> Path:
    """Where this start logs; the log of the last one is kept beside it."""
    log = directory / "broker.log"
    if log.exists():
        log.replace(directory / "broker.log.1")
    return log


def _dying_with(parent: int) -> Callable[[], None]:
    # looked up before the fork: a child of a process with threads may do very little
    prctl = ctypes.CDLL(None).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return before_exec


def _format(
    directory: Path, command: list[str], port: int, controller_port: int, setup: Setup
) -> None:
    """Make an empty log directory. It gets its name when it is complete."""
    # encoded it begins with A; an id that began with '-' would look like an option
    uuid_bytes = b"\0" + uuid.uuid4().bytes[1:]
    cluster_id = base64.urlsafe_b64encode(uuid_bytes).decode().rstrip("=")
    half = directory / "data.new"
    shutil.rmtree(half, ignore_errors=True)
    properties = _write_properties(
        directory / "format.properties", half, port, controller_port, setup
    )
    arguments = [
        "kafka.tools.StorageTool",
        "format",
        "--standalone",
        "--cluster-id",
        cluster_id,
        "--config",
        str(properties),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    properties.unlink()
    if done.returncode:
        log = directory / "broker.log"
        log.write_text(done.stdout + done.stderr)
        _explain(log, port, "could not format its directory")
    half.rename(directory / "data")


def _is_formatted(directory: Path) -> bool:
    return (directory / "data" / "meta.properties").exists()


def _write_properties(
    path: Path, data: Path, port: int, controller_port: int, setup: Setup
) -> Path:
    # the last one wins
    lines = [
        (FILES / "server.properties").read_text(),
        *(f"{name}={value}\n" for name, value in setup.properties.items()),
    ]
    return _write(
        path,
        Template("".join(lines)).substitute(data=data, port=port, controller_port=controller_port),
    )


def _ports(directory: Path, port: int) -> tuple[int, int]:
    """Ports for clients and for the controller: `port` if given, else those of last time, else free
    ones.
    """
    noted = _noted(directory)
    if port and not _is_free(port):
        _raise_port_taken(port)
    first = port or _free_port(noted.get("port", 0))
    return first, _free_port(noted.get("controller_port", 0), besides=first)


def _free_port(wanted: int, besides: int = 0) -> int:
    for port in (wanted, *random.sample(PORTS, 200)):
        if port and port != besides and _is_free(port):
            return port
    raise PortTaken(
        f"no free port found between {PORTS.start} and {PORTS.stop} on {HOST}; stop something, or give one with --port"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # as the JVM does: closed connections do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise PortTaken(
                f"port {port} needs rights this user does not have; give one above 1023 with --port"
            ) from None
        except OSError:
            return False
    return True


def _raise_port_taken(port: int) -> NoReturn:
    """Says by whom, where this user may know."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                name = psutil.Process(connection.pid).name()
                raise PortTaken(
                    f"port {port} on {HOST} is taken by {name} (pid {connection.pid}); stop it, or give another one with --port"
                )
    raise PortTaken(
        f"port {port} on {HOST} is taken by another process; stop it, or give another one with --port"
    )


def _wait_until_answers(broker: Broker, limit_s: float, setup: Setup) -> None:
    deadline = time.monotonic() + limit_s
    while not _answers(broker.address, setup.client):
        if not broker.alive():
            _explain(broker.directory / "broker.log", broker.port, "ended before it was ready")
        if time.monotonic() > deadline:
            raise BrokerUnreachable(
                f"the broker (pid {broker.process.pid}) does not answer at {broker.address} for {limit_s:.0f} s; see {broker.directory}/broker.log"
            )
        time.sleep(0.05)


def _answers(address: str, client: Mapping[str, Any] = PLAIN.client) -> bool:
    """Does a broker at `address` answer, and count itself as one that takes work? `client` may name
    another of its listeners.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    host, port = address.split(":")
    try:
        # while nobody listens, librdkafka would only wait and grumble
        socket.create_connection((host, int(port)), 0.5).close()
        return bool(
            AdminClient({"bootstrap.servers": address, "log_level": 0, **client})
            .list_topics(timeout=2)
            .brokers
        )
    except (OSError, KafkaException):
        return False


def _is_kafka(process: psutil.Process, directory: Path) -> bool:
    """Is it still that process (numbers are used again), and a broker on that directory? An ended
    one nobody has waited for is not.
    """
    try:
        return process.is_running() and process.cmdline()[-2:] == [
            "kafka.Kafka",
            str(directory / "server.properties"),
        ]
    except psutil.Error:
        return False


# ---- what went wrong -----------------------------------------------------------------------------

REASONS: tuple[tuple[str, type[StreamrlError], str], ...] = (
    (
        r"No space left on device",
        BrokerError,
        "the disk that holds {directory} is full; free some space",
    ),
    (
        r"Address already in use",
        PortTaken,
        "port {port}, or the one of its controller, was taken meanwhile; try again, or give one with --port",
    ),
    (
        r"Failed to acquire lock on file",
        BrokerError,
        "another Kafka works in {directory}/data; stop it first",
    ),
    (
        r"Invalid cluster\.id|InconsistentClusterId|[Nn]ode id .* doesn't match",
        BrokerError,
        "{directory}/data is another Kafka's; move it away",
    ),
    (
        r"OutOfMemoryError|insufficient memory|Could not reserve enough space",
        BrokerError,
        "too little memory; it needs about 700 MB",
    ),
    (
        r"UnsupportedClassVersionError",
        BrokerError,
        "this Java is too old; Kafka needs 17 or newer (set JAVA_HOME)",
    ),
)


def _explain(log: Path, port: int, what: str) -> NoReturn:
    """Raise what its log says, as one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    for pattern, error, reason in REASONS:
        if re.search(pattern, text):
            raise error(f"the broker {what}: " + reason.format(directory=log.parent, port=port))
    lines = [line for line in text.splitlines() if re.search(r"ERROR|FATAL|Exception", line)]
    raise BrokerError(
        f"the broker {what}: {lines[-1][:300] if lines else 'nothing was logged'}; see {log}"
    )


def _check_disk(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < LEAST_DISK_BYTES:
        raise BrokerError(
            f"the disk that holds {directory} has {free >> 20} MiB left; a broker needs {LEAST_DISK_BYTES >> 20} MiB to start with: free some space"
        )


# ---- small things --------------------------------------------------------------------------------


def _noted(directory: Path) -> dict[str, Any]:
    """What broker.json says of the last start; empty when there was none."""
    try:
        return json.loads((directory / "broker.json").read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, text: str) -> Path:
    """Whole or not at all, for whoever reads it meanwhile."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    return part.replace(path)
