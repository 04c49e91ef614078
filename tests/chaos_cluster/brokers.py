"""The cluster under a run, and what is done to it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from jgo.maven import MavenContext
from kafka import KafkaAdminClient

from streamrl.stream.local_kafka import broker, cluster
from streamrl.stream.local_kafka.cluster import Cluster, Node
from streamrl.stream.local_kafka.distribution import VERSION
from streamrl.stream.local_kafka.jvm import java_command

DISK_MIB = 400  # of the broker whose disk is filled
FULL_DISK = 3  # its number
BALLAST = "ballast"
COMMAND_S = 60.0  # of Kafka's own command for quotas


class Brokers:
    """Three brokers in `directory`, numbered from 1. The data of FULL_DISK are on a small disk of
    their own, where this user may mount one.
    """

    def __init__(self, directory: Path) -> None:
        self._disk = directory / f"broker-{FULL_DISK}"
        self._disk.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self._disk)]
        self.has_disk = subprocess.run(command, capture_output=True).returncode == 0
        try:
            self._cluster: Cluster = cluster.start(directory)
        except BaseException:
            self._unmount()
            raise
        self.address = self._cluster.address
        self._admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def close(self) -> None:
        for node in self._cluster.nodes:
            if node.alive():
                self.resume(node)
        self._cluster.stop()
        self._unmount()

    def _unmount(self) -> None:
        if self.has_disk:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=True)

    # ---- who is what -----------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        return self._cluster.nodes

    def leader(self, topic: str, partition: int = 0) -> Node:
        """The broker that leads a partition."""
        metadata = self._admin.list_topics(topic, timeout=30)
        return self._cluster.nodes[metadata.topics[topic].partitions[partition].leader - 1]

    def controller(self) -> Node:
        """The broker that is the active controller."""
        admin = KafkaAdminClient(bootstrap_servers=self.address.split(","))
        try:
            quorum = admin.describe_metadata_quorum()
            leader = quorum["topics"][0]["partitions"][0]["leader_id"]
            return self._cluster.nodes[leader - 1]
        finally:
            admin.close()

    def in_sync(self) -> bool:
        """Whether every partition has a leader and all of its copies in sync."""
        try:
            topics: Any = self._admin.list_topics(timeout=5).topics
        except KafkaException:
            return False
        return all(
            partition.leader >= 0 and len(partition.isrs) == len(partition.replicas)
            for topic in topics.values()
            for partition in topic.partitions.values()
        )

    # ---- what is done to them --------------------------------------------------------------------

    def stop(self, node: Node) -> None:
        assert node.process is not None
        node.process.stop()

    def kill(self, node: Node) -> None:
        assert node.process is not None
        node.process.kill()

    def start(self, node: Node) -> None:
        if not node.alive():
            node.launch()

    def suspend(self, node: Node) -> None:
        assert node.process is not None
        os.kill(node.process.process.pid, signal.SIGSTOP)

    def resume(self, node: Node) -> None:
        assert node.process is not None
        os.kill(node.process.process.pid, signal.SIGCONT)

    def restore(self) -> None:
        """Resume and start every broker that is suspended or has ended."""
        if self.has_disk:
            self.clear_disk()
        for node in self._cluster.nodes:
            if node.alive():
                self.resume(node)
            else:
                self.start(node)

    def answers(self, node: Node) -> bool:
        return broker.answers(node.address)

    def fill_disk(self) -> Node:
        """Nothing can be written to the disk of one broker from now on. Returns the broker."""
        try:
            with (self._disk / BALLAST).open("ab", buffering=0) as ballast:
                while ballast.write(bytes(1 << 16)):
                    pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        return self._cluster.nodes[FULL_DISK - 1]

    def clear_disk(self) -> None:
        (self._disk / BALLAST).unlink(missing_ok=True)

    def limit(self, write_bytes_per_s: int, read_bytes_per_s: int) -> None:
        """Limit what each client may write and read at each broker."""
        rates = f"producer_byte_rate={write_bytes_per_s},consumer_byte_rate={read_bytes_per_s}"
        self._configure_clients("--add-config", rates)

    def lift_limits(self) -> None:
        self._configure_clients("--delete-config", "producer_byte_rate,consumer_byte_rate")

    def _configure_clients(self, *change: str) -> None:
        # The broker does not need the jar of Kafka's own commands.
        tools = MavenContext().project("org.apache.kafka", "kafka-tools").at_version(VERSION)
        *java, jars = java_command()
        classes = f"{jars}:{tools.artifact().resolve()}"
        command = [*java, classes, "org.apache.kafka.tools.ConfigCommand"]
        where = ["--bootstrap-server", self.address, "--entity-type", "clients"]
        subprocess.run(
            [*command, *where, "--entity-default", "--alter", *change],
            check=True,
            capture_output=True,
            timeout=COMMAND_S * 5,
        )
