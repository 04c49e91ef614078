"""A Ray cluster on this host: a head that has nothing to give, and several nodes, each of them a
real raylet with processes of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from ray._private import services
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
from ray.cluster_utils import Cluster as Rays

from streamrl.stream.local_kafka.ports import free_port
from tests.support.waiting import patience

CPUS = 8  # of a node, whatever this host has
# Ports of a node's own processes, which then need not tell within 15 s what they chose.
PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)
START_RAYLET = services.start_raylet
SETTINGS = {
    "RAY_raylet_start_wait_time_s": f"{patience(30):.0f}",
    "RAY_agent_register_timeout_ms": f"{patience(30_000):.0f}",
    "RAY_worker_register_timeout_seconds": f"{patience(60):.0f}",
    "RAY_enable_worker_prestart": "0",  # a node would start a process for each CPU
    "RAY_worker_niceness": "0",  # 15 otherwise, and others keep this host busy
}


class Cluster:
    """Nodes node1 to node<count>. Commands find it by `environment`."""

    def __init__(self, count: int) -> None:
        self._rays = Rays(initialize_head=True, head_node_args={"num_cpus": 0, **_ports()})
        self._nodes: dict[str, Any] = {}
        self.environment = {**os.environ, "RAY_ADDRESS": self._rays.address}
        for number in range(1, count + 1):
            self.start_node(f"node{number}")

    def start_node(self, node: str) -> None:
        self._nodes[node] = self._rays.add_node(wait=False, num_cpus=CPUS, **_ports())

    def kill_node(self, node: str) -> int:
        """Kill whatever runs on a node, as its end would. Returns the number of processes."""
        raylet = self._raylet(node)
        victims = [raylet, *raylet.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self._rays.remove_node(self._nodes.pop(node), allow_graceful=False)
        return len(victims)

    def jobs(self) -> dict[str, str]:
        """The node of each machine, by the name of its job."""
        return {job: f"RUNNING {node}" for job, node, _ in self._machines()}

    def stop(self) -> None:
        for node in list(self._nodes):
            self.kill_node(node)
        self._rays.shutdown()

    def _machines(self) -> Iterator[tuple[str, str, psutil.Process]]:
        """Job, node and process of each `streamrl up` on a node."""
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in self._raylet(node).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        line = process.cmdline()
                        if "up" in line and "guarded" not in line:
                            joins = any(word.startswith("--only") for word in line)
                            yield f"streamrl.run.{'samples' if joins else 'trains'}", node, process

    def _raylet(self, node: str) -> psutil.Process:
        (started,) = self._nodes[node].all_processes["raylet"]
        return psutil.Process(started.process.pid)


def _start_raylet(*arguments: Any, **options: Any) -> Any:
    """Start a node that is told of the last port, for which Ray waits even if it was given."""
    node, session = arguments[2], arguments[11]
    port = options["dashboard_agent_listen_port"]
    persist_port(session, node, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    return START_RAYLET(*arguments, **options)


def _ports() -> dict[str, int]:
    return {name: free_port() for name in PORTS}


@contextlib.contextmanager
def ray_cluster(directory: Path, count: int) -> Iterator[Cluster]:
    """A cluster that is up while the block lasts. Its logs are where Ray keeps them."""
    directory.mkdir()
    # Every process of Ray imports jsonschema, which compiles a grammar for 3 s if it finds this
    # package of a tool in our environment.
    (directory / "rfc3987_syntax.py").write_text("raise ImportError\n")
    with (
        patch.dict(os.environ, {**SETTINGS, "PYTHONPATH": str(directory)}),
        patch.object(services, "start_raylet", _start_raylet),
    ):
        cluster = Cluster(count)
        try:
            yield cluster
        finally:
            cluster.stop()
