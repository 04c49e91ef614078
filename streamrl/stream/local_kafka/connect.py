"""How a run's Kafka is reached, be it a cluster or the local broker of the run.

STREAMRL_KAFKA or `kafka` in the run file names a cluster; without either the run has a broker of
its own, in its directory (`broker.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.addresses import cleartext_problem
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import resolve_references
from streamrl.stream.local_kafka import broker, cluster, storage
from streamrl.stream.local_kafka.distribution import VERSION
from streamrl.stream.local_kafka.jvm import raise_from_log
from streamrl.system.errors import BrokerUnreachable, ConfigError
from streamrl.system.yaml_reader import from_yaml

logger = logging.getLogger(__name__)


def broker_dir(run: RunFile) -> Path:
    """Where the run's local broker lives."""
    return run.directory / "kafka"


def cluster_settings(run: RunFile) -> dict[str, Any]:
    """librdkafka settings of the cluster that STREAMRL_KAFKA or else the run file names. Without
    `bootstrap.servers` it is the local broker.

    STREAMRL_KAFKA is `host:port[,host:port]`, or a YAML map of settings (`{bootstrap.servers: ...,
    security.protocol: SASL_SSL, ...}`). A value `env:NAME` is looked up here, so the settings
    returned hold secrets and are for clients only.
    """
    text = os.environ.get("STREAMRL_KAFKA", "")
    named: dict[str, Any] = {}
    if text.lstrip().startswith("{"):
        try:
            named = from_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(
                "STREAMRL_KAFKA: not host:port and not a map like "
                "'{bootstrap.servers: host:port, security.protocol: SSL}'"
            ) from None
    elif text:
        named = {"bootstrap.servers": text}
    return without_cleartext(resolve_references({**run.kafka, **named}, "kafka"), "kafka")


def local_directory(run: RunFile) -> Path | None:
    """Where the run's local broker lives, unless the run has a cluster."""
    return None if "bootstrap.servers" in cluster_settings(run) else broker_dir(run)


def without_cleartext(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings. Raises ConfigError if they would send a password in clear."""
    if problem := cleartext_problem(settings):
        raise ConfigError(f"{where}: {problem}")
    return settings


def properties_file(path: Path) -> dict[str, Any]:
    """The settings of a cluster in a file of an administrator: librdkafka's names, or those of
    Kafka's own commands, one `name=value` a line. Raises ConfigError.
    """
    settings: dict[str, Any] = {}
    try:
        lines = re.sub(r"\\\n\s*", "", path.read_text()).splitlines()  # A backslash continues one.
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--kafka {path}: it cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith(("#", "!")):
            continue
        if not equals:
            raise ConfigError(f"--kafka {path}:{number}: give name=value")
        settings |= _librdkafkas(name.strip(), value.strip())
    if "bootstrap.servers" not in settings:
        raise ConfigError(f"--kafka {path}: it has no bootstrap.servers")
    return without_cleartext(settings, f"--kafka {path}")


def _librdkafkas(name: str, value: str) -> dict[str, str]:
    """A setting of Kafka's Java clients as librdkafka's, which has the same name for most."""
    if name == "sasl.jaas.config":
        given = dict(re.findall(r'(username|password)\s*=\s*"((?:[^"\\]|\\.)*)"', value))
        return {f"sasl.{key}": re.sub(r"\\(.)", r"\1", text) for key, text in given.items()}
    if name == "ssl.truststore.type":
        return {}
    if name == "ssl.truststore.location":
        return {"ssl.ca.location": value}
    return {name: value}


def client_settings(run: RunFile) -> dict[str, Any]:
    """librdkafka settings to reach the run's Kafka. Raises BrokerUnreachable when it is a local one
    that is not running.
    """
    settings = cluster_settings(run)
    if "bootstrap.servers" in settings:
        return settings
    directory = broker_dir(run)
    address = broker.running_address(directory)
    if address is None:
        raise BrokerUnreachable(
            f"no broker is running for run {run.run!r} ({directory}); start one with "
            "`streamrl broker RUN.yaml` or name yours in STREAMRL_KAFKA"
        )
    return {**settings, "bootstrap.servers": address}


@contextlib.contextmanager
def connect_or_start(run: RunFile, create: bool = False) -> Generator[dict[str, Any]]:
    """The settings of `client_settings`. The local broker of a run that is stopped is started on
    its data while the block lasts. With `create`, so is one that the run never had.
    """
    settings = cluster_settings(run)
    directory = broker_dir(run)
    has_broker = create or storage.is_formatted(directory) or cluster.is_cluster(directory)
    if "bootstrap.servers" in settings or not has_broker:
        yield client_settings(run)
        return
    with cluster.ensure_running(directory) as address:
        yield {**settings, "bootstrap.servers": address}


def serve(run: RunFile, stop: threading.Event, port: int = 0, brokers: int = 0) -> None:
    """Be the run's local Kafka until `stop` is set: as many `brokers` as it has, or by default one.

    A broker that ends by itself is an error. One of a cluster is started again.
    """
    address = cluster_settings(run).get("bootstrap.servers")
    if address:
        raise ConfigError(
            f"the run uses the cluster at {address} (run file or STREAMRL_KAFKA): "
            "there is no broker to start"
        )
    directory = broker_dir(run)
    is_cluster = cluster.is_cluster(directory)
    if is_cluster and brokers == 1:
        raise ConfigError(
            f"{directory} has the data of {cluster.BROKERS} brokers; leave out --brokers"
        )
    if is_cluster or brokers == cluster.BROKERS:
        _serve_cluster(directory, stop, port)
    else:
        _serve_broker(directory, stop, port)


def _serve_cluster(directory: Path, stop: threading.Event, port: int) -> None:
    started = cluster.start(directory, port)
    logger.info("Kafka %s at %s, data in %s", VERSION, started.address, directory)
    try:
        started.watch(stop)
    finally:
        started.stop()


def _serve_broker(directory: Path, stop: threading.Event, port: int) -> None:
    started = broker.start(directory, port)
    pid = started.process.pid
    logger.info(
        "Kafka %s at %s, pid %d, data in %s", VERSION, started.address, pid, started.directory
    )
    try:
        while not stop.wait(0.2):
            if not started.alive():
                raise_from_log(started.directory / "broker.log", started.port, "stopped by itself")
    finally:
        started.stop()
