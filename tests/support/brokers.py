"""The broker that the tests use, by STREAMRL_TEST_BROKER: `local`, a process of this machine, or
`container`, Kafka as docker-compose.yml has it.

With Docker:

    export STREAMRL_TEST_BROKER=container
    .venv/bin/pytest tests/stream/log/test_contract.py tests/deploy/test_compose.py

the first is what every log promises, the second the loop. Tests of the local broker itself, and of
runs that have one of their own, start a local one either way.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from streamrl.stream.local_kafka import broker as local
from streamrl.stream.local_kafka import ports
from streamrl.stream.local_kafka.broker import Setup
from tests.support.waiting import patience

VARIABLE = "STREAMRL_TEST_BROKER"
KINDS = ("local", "container")
ROOT = Path(__file__).parents[2]
# What Java has parsed of the classes that a broker loads. With it a broker starts in half the time.
CLASSES = ROOT / ".streamrl" / "kafka-classes.jsa"
PULL_AND_START_S = patience(600.0)
# Of docker-compose.yml's Kafka: where it listens and where its data lie are another machine's.
PLACES = (
    "listeners",
    "advertised.listeners",
    "listener.security.protocol.map",
    "controller.quorum.voters",
    "log.dirs",
    "node.id",
)


class NoDocker(Exception):
    """In one line."""


def chosen(environment: Mapping[str, str] = os.environ) -> str:
    """Raises ValueError for a kind that there is not."""
    kind = environment.get(VARIABLE) or "local"
    if kind not in KINDS:
        raise ValueError(f"{VARIABLE} is {kind!r}; give {' or '.join(KINDS)}, or leave it out")
    return kind


def check() -> None:
    """Can the chosen kind be had? Raises ValueError, NoDocker."""
    if chosen() == "container":
        import docker
        from docker.errors import DockerException

        try:
            docker.from_env().ping()
        except DockerException as error:
            why = " ".join(str(error).split())
            raise NoDocker(
                f"{VARIABLE}=container needs Docker, and none answers here ({why}); start it, or"
                f" leave {VARIABLE} out"
            ) from None


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Address of a broker of the chosen kind, for as long as the block lasts."""
    with container() if chosen() == "container" else local.ensure_running(directory) as address:
        yield address


@contextmanager
def composed(directory: Path) -> Iterator[str]:
    """As `running`; a local one has the settings of docker-compose.yml's Kafka, too."""
    if chosen() == "container":
        with container() as address:
            yield address
        return
    broker = local.start(directory, setup=Setup(settings(service()["environment"])))
    try:
        yield broker.address
    finally:
        broker.stop()


@contextmanager
def container() -> Iterator[str]:
    """docker-compose.yml's Kafka under Docker, on a port of this machine; nothing of it is kept."""
    from testcontainers.core.container import DockerContainer

    kafka = service()
    port = random.choice(ports.PORTS)
    environment = {
        **kafka["environment"],
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://127.0.0.1:{port}",
    }
    kafka_container = DockerContainer(
        kafka["image"], env={name: str(value) for name, value in environment.items()}
    ).with_bind_ports(9092, port)
    kafka_container.start()
    try:
        _wait(f"127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"
    finally:
        kafka_container.stop()


def service() -> dict[str, Any]:
    """The service `kafka` of docker-compose.yml."""
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["kafka"]


def properties(environment: Mapping[str, Any]) -> dict[str, str]:
    """What the image makes of its variables: KAFKA_A_B is a.b. Kafka's names have neither `-` nor
    `_`, so three or two underscores do not occur.
    """
    return {
        name.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
        for name, value in environment.items()
        if name.startswith("KAFKA_")
    }


def settings(environment: Mapping[str, Any]) -> dict[str, str]:
    """Those that are the same wherever it runs."""
    return {name: value for name, value in properties(environment).items() if name not in PLACES}


def _wait(address: str) -> None:
    deadline = time.monotonic() + PULL_AND_START_S
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    while True:
        try:
            admin.list_topics(timeout=patience(5))
            return
        except KafkaException as error:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"the container's Kafka does not answer at {address}: {error}"
                ) from None


def archive_classes() -> None:
    """Write CLASSES. A Java that finds other jars than those it was made of, or is another Java,
    does without it.
    """
    os.environ["JDK_JAVA_OPTIONS"] = f"-XX:ArchiveClassesAtExit={CLASSES}"
    with tempfile.TemporaryDirectory() as directory:
        local.start(Path(directory)).stop(patience(120.0))


if __name__ == "__main__":  # `make test`, once
    archive_classes()
