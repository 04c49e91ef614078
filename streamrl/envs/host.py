"""The replicas of one process, of one env or of many. They share what a process has once: the
reader of demand and servers, the connections to servers, and the transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.config import topology
from streamrl.envs.replica import Replica, RolloutGroup
from streamrl.inference.clients.client import Client, apply_server_event
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Message, TopicPartition, Undecodable
from streamrl.stream.records import Demand, Server, Visit

logger = logging.getLogger(__name__)

SCHEMAS = ("demand", "server", "visit")


class Finished(NamedTuple):
    """What a replica has to publish: groups, model calls, or both."""

    replica: Replica
    groups: list[RolloutGroup]


@dataclass
class EnvHost:
    """The replicas of a process. `on_messages` tells them of the world, `launch` begins groups, and
    `take_finished` and `outputs` give what is to be published.
    """

    replicas: Sequence[Replica]
    clients: Sequence[Client]  # of their pools
    # Where the inputs ended when this process began.
    began: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    version: int = 0  # the newest policy version that a server had

    def __post_init__(self) -> None:
        self._of_env: dict[str, list[Replica]] = {}
        for replica in self.replicas:
            self._of_env.setdefault(replica.name, []).append(replica)

    def of_env(self, env: str) -> Sequence[Replica]:
        return self._of_env.get(env, ())

    def on_messages(self, messages: Sequence[Message]) -> None:
        """Take note of demand, servers, and visits of problems."""
        for message in messages:
            event = to_event(message, SCHEMAS)
            match event.record:
                case Demand() as demand:
                    for replica in self.of_env(demand.environment):
                        replica.on_demand(demand)
                case Server() as server:
                    self._on_version(server.version)
                    apply_server_event(event, self.clients, self.began)
                case Visit() as visit:
                    for replica in self.of_env(visit.environment):
                        replica.on_visit(visit)
                case None if event.topic == topology.SERVERS:
                    apply_server_event(event, self.clients, self.began)
                case Undecodable(cause=cause):
                    place = f"{event.topic}[{event.partition}]@{event.offset}"
                    logger.warning("%s is skipped: %s", place, cause)
                case _:
                    pass

    def _on_version(self, version: int) -> None:
        if version > self.version:
            self.version = version
            for replica in self.replicas:
                replica.version = version

    def resume_open(self) -> None:
        for replica in self.replicas:
            replica.resume_open()

    def launch(self, now_s: float) -> None:
        """Begin as many groups of each env as its demand, concurrency and rate allow."""
        for replica in self.replicas:
            replica.launch(now_s)

    def take_finished(self, now_s: float) -> list[Finished]:
        """What has finished since the last call, of each replica that has something to publish. An
        unexpected error in a group is raised, and ends the process.
        """
        finished: list[Finished] = []
        for replica in self.replicas:
            groups = replica.take_finished(now_s)
            if groups or replica.has_records:
                finished.append(Finished(replica, groups))
        return finished

    def outputs(self, finished: Sequence[Finished]) -> list[Message]:
        """One transaction, which ends with the progress of one of the replicas."""
        return list(self._outputs(finished))

    def _outputs(self, finished: Sequence[Finished]) -> Iterator[Message]:
        for replica, groups in finished:
            yield from replica.outputs(groups)

    async def close(self) -> None:
        """Cancel what is running, and close the envs and the connections."""
        for replica in self.replicas:
            await replica.close()
        for client in self.clients:
            await client.close()
