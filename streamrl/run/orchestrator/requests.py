"""What a run needs of its machines: what an engine such as Slurm or Kubernetes reserves for it, and
what has to be shared between machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.addresses import are_loopback, is_loopback
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Placement
from streamrl.config.topology import Part
from streamrl.stream.local_kafka.connect import cluster_settings


class Request(NamedTuple):
    """What is reserved for a part, or for all parts of a machine."""

    cpus: float
    memory_gib: float  # 0: what is usual there
    gpus: int

    def __str__(self) -> str:
        memory = f", {self.memory_gib:g} GiB" if self.memory_gib else ""
        gpus = f", {_count(self.gpus, 'GPU')}" if self.gpus else ""
        return _count(self.cpus, "CPU") + memory + gpus


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'s' if number != 1 else ''}"


def part_request(run: RunFile, part: Part) -> Request:
    """What `placement` reserves for a part: its CPUs, its memory and the number of its GPUs."""
    placement = topology.placement_of(run, part) or Placement()
    return Request(placement.cpus, placement.memory_gib, len(topology.devices_of(run, part)))


def machine_request(run: RunFile, parts: Iterable[Part]) -> Request:
    """What a machine needs that has all of these parts. The parts may share a GPU, and their
    numbers count from 0. Its memory is only known if that of each part is.
    """
    requests: list[Request] = []
    gpus = 0
    for part in parts:
        requests.append(part_request(run, part))
        gpus = max([gpus, *(device.number + 1 for device in topology.devices_of(run, part))])
    memories = [request.memory_gib for request in requests]
    memory_gib = sum(memories) if all(memories) else 0.0
    return Request(sum(request.cpus for request in requests), memory_gib, gpus)


def obstacles(run: RunFile) -> Iterator[str]:
    """Why the parts of a run could not reach each other from several machines, each with what to
    do. Raises ConfigError as `cluster_settings` does.
    """
    servers = str(cluster_settings(run).get("bootstrap.servers", ""))
    if not servers:
        yield "the run has no Kafka that other machines reach: name it in STREAMRL_KAFKA or `kafka`"
    elif are_loopback(servers):
        yield f"Kafka at {servers} is reached from its own machine only: give another address"
    spread = topology.machines(run)
    if len(spread) > 1 and any(run.inference.sizes.values()) and is_loopback(run.inference.host):
        yield (
            f"inference.host {run.inference.host} is reached from its own machine only: set it to"
            " env:STREAMRL_INFERENCE_HOST, and inference.api_key"
        )
    gang = {
        machine: part.name
        for machine, parts in spread.items()
        for part in parts
        if part.processes > 1
    }
    if len(gang) > 1:
        yield (
            f"{', '.join(gang.values())} start together and have machines {', '.join(gang)}: start"
            " them by hand, with `streamrl learner --coordinator`"
        )
