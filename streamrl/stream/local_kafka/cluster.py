"""Three local brokers that are one cluster, each broker and controller: for tests, and for a host
whose run is to survive the death of a broker.

Topics have three replicas, of which two have to be in sync. Each broker has a directory of its own
in that of the run's Kafka (`storage.py`). It is recognised by these directories, so that commands
that find a run's Kafka stopped start all three again.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from streamrl.stream.local_kafka import broker, storage
from streamrl.stream.local_kafka.broker import Broker, Setup
from streamrl.stream.local_kafka.jvm import java_command, raise_from_log
from streamrl.stream.local_kafka.ports import HOST, choose_ports
from streamrl.system.errors import BrokerError, StreamrlError

logger = logging.getLogger(__name__)

BROKERS = 3
HEAP_MB = 320
START_LIMIT_S = 180.0  # all at once, on a busy machine
STOP_LIMIT_S = 8.0
WATCH_S = 0.2
# A broker that ends is started again after 1 s, and after twice as long each time that it has not
# answered meanwhile.
BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "offsets.topic.num.partitions": "12",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.num.partitions": "12",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
}


@dataclass
class Node:
    """One broker of a cluster, whether it runs or not."""

    directory: Path
    port: int
    controller_port: int
    setup: Setup
    process: Broker | None = None
    failures: int = 0  # starts in a row after which it did not answer
    next_start_s: float = 0.0  # monotonic

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def launch(self, die_with_parent: bool = True) -> None:
        """Start its process, which takes work seconds later."""
        self.process = broker.launch_on(
            self.directory, self.port, self.controller_port, die_with_parent, self.setup
        )


class Cluster:
    """Brokers that this process has started."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def address(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def watch(self, stop: threading.Event) -> None:
        """Start each broker that ends again, until `stop` is set."""
        while not stop.wait(WATCH_S):
            for node in self.nodes:
                _restart_if_ended(node)

    def stop(self) -> None:
        """Ask all brokers to end, and kill those that have not within STOP_LIMIT_S. The last of
        them has no other controller left to hand its partitions over to.
        """
        running = [node.process for node in self.nodes if node.process is not None]
        for one in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.process.terminate()
        _, left = psutil.wait_procs([one.process for one in running], STOP_LIMIT_S)
        for process in left:
            process.kill()
            process.wait()


def is_cluster(directory: Path) -> bool:
    """Whether `directory` has the data of a cluster."""
    return storage.node_directories(directory) != [directory]


def start(directory: Path, port: int = 0, die_with_parent: bool = True) -> Cluster:
    """Start all brokers on `directory`, and wait until each answers. `port` is that of the first.

    Raises BrokerError (brokers run already, or the directory has the data of a single broker),
    PortTaken, BrokerUnreachable.
    """
    directory = directory.absolute()
    if storage.is_formatted(directory):
        raise BrokerError(
            f"{directory} has the data of one broker, which cannot become a cluster; leave out"
            " --brokers, or take another run"
        )
    with broker.sole_starter(directory):
        if found := broker.find(directory):
            raise BrokerError(
                f"a broker is already running on {directory} (at {found.address}, "
                f"pid {found.process.pid}); use it, or stop it first"
            )
        cluster = Cluster(_nodes(directory, port))
        _format(cluster.nodes)
        try:
            for node in cluster.nodes:
                node.launch(die_with_parent)
            for node in cluster.nodes:
                assert node.process is not None
                broker.wait_until_answers(node.process, START_LIMIT_S)
        except BaseException:
            for node in cluster.nodes:
                if node.process is not None:
                    node.process.kill()
            raise
    return cluster


@contextlib.contextmanager
def ensure_running(directory: Path) -> Generator[str]:
    """Address of the Kafka on `directory`, be it one broker or a cluster. What had to be started
    for it is stopped again at the end.
    """
    if not is_cluster(directory):
        with broker.ensure_running(directory) as address:
            yield address
    elif address := broker.running_address(directory):
        yield address
    else:
        cluster = start(directory)
        try:
            yield cluster.address
        finally:
            cluster.stop()


def _nodes(directory: Path, port: int) -> list[Node]:
    """The brokers with their ports, each those of last time where they are free."""
    nodes: list[Node] = []
    for number in range(1, BROKERS + 1):
        own = directory / f"broker-{number}"
        own.mkdir(exist_ok=True)
        storage.check_free_space(own)
        last = storage.read_broker_json(own)
        asked = port if number == 1 else 0
        ports = choose_ports(asked, last.get("port", 0), last.get("controller_port", 0))
        nodes.append(Node(own, *ports, Setup()))
    controllers = ",".join(f"{HOST}:{node.controller_port}" for node in nodes)
    for number, node in enumerate(nodes, 1):
        own = {"node.id": str(number), "controller.quorum.bootstrap.servers": controllers}
        node.setup = Setup({**REPLICATED, **own}, heap_mb=HEAP_MB)
    return nodes


def _format(nodes: list[Node]) -> None:
    """Make the data directories of a new cluster. A first start that was interrupted is repeated
    from its beginning, as all brokers have to be given the same ids. Raises BrokerError for a
    cluster that was used and lacks the data of a broker.
    """
    missing = [node.directory for node in nodes if not storage.is_formatted(node.directory)]
    if not missing:
        return
    if any(storage.read_broker_json(node.directory) for node in nodes):
        raise BrokerError(
            f"{missing[0]}/data is missing, and the other brokers of its cluster have been used;"
            " put it back, or take another run"
        )
    for node in nodes:
        shutil.rmtree(node.directory / "data", ignore_errors=True)
    command = java_command(HEAP_MB)
    controllers = ",".join(
        f"{number}@{HOST}:{node.controller_port}:{storage.new_id()}"
        for number, node in enumerate(nodes, 1)
    )
    quorum = ("--cluster-id", storage.new_id(), "--initial-controllers", controllers)

    def format_one(node: Node) -> None:
        storage.format_data(
            node.directory,
            command,
            node.port,
            node.controller_port,
            node.setup.properties,
            quorum,
        )

    with ThreadPoolExecutor(BROKERS) as pool:
        list(pool.map(format_one, nodes))


def _restart_if_ended(node: Node) -> None:
    now_s = time.monotonic()
    if node.alive():
        if node.failures and broker.answers(node.address):
            logger.info("the broker at %s takes work again", node.address)
            node.failures = 0
        return
    if node.next_start_s == 0.0:
        pause_s = min(BACKOFF_S * 2**node.failures, MAX_BACKOFF_S)
        node.next_start_s = now_s + pause_s
        logger.warning("%s; it is started again in %.0f s", _why_ended(node), pause_s)
    elif now_s >= node.next_start_s:
        node.next_start_s = 0.0
        node.failures += 1
        try:
            node.launch()
        except StreamrlError as error:
            logger.warning("the broker at %s did not start: %s", node.address, error)


def _why_ended(node: Node) -> str:
    where = f"at {node.address} has ended"
    exit_code = None if node.process is None else node.process.process.wait()
    if exit_code is not None and exit_code < 0:
        return f"the broker {where}: signal {-exit_code}"
    try:
        raise_from_log(node.directory / "broker.log", node.port, where)
    except StreamrlError as error:
        return str(error)
