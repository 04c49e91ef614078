"""What is in the directory of a local broker, or in that of each broker of a cluster
(`cluster.py`), which is broker-1/, broker-2/ and broker-3/ in the directory of the run's Kafka.

data/               the log itself, Kafka's own files
broker.json         process and ports of the last start
server.properties   its settings
broker.log          what it has logged; broker.log.1 is the log of the start before
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from streamrl.stream.local_kafka.distribution import FILES
from streamrl.stream.local_kafka.jvm import raise_from_log
from streamrl.system.errors import BrokerError
from streamrl.system.files import write_atomically

MIN_FREE_BYTES = 256 * 1024 * 1024
# A broker that was killed loses its command line before it lets go of its files.
EXIT_LIMIT_S = 3.0
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"  # a broker that was not killed leaves it in its data


def check_free_space(directory: Path) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < MIN_FREE_BYTES:
        raise BrokerError(
            f"the disk that holds {directory} has {free_bytes >> 20} MiB left; a broker needs "
            f"{MIN_FREE_BYTES >> 20} MiB to start with: free some space"
        )


def is_formatted(directory: Path) -> bool:
    return (directory / "data" / "meta.properties").exists()


def was_shut_down(directory: Path) -> bool:
    """Whether the last broker on this data has ended cleanly. One that was killed has not."""
    return (directory / "data" / CLEAN_SHUTDOWN).exists()


def node_directories(directory: Path) -> list[Path]:
    """The directories of the brokers of a run's Kafka: those of a cluster, else the one given."""
    return sorted(directory.glob("broker-[1-9]")) or [directory]


def new_id() -> str:
    """A new id of a cluster or of a data directory, as Kafka writes them: base64 of 16 bytes. The
    first byte makes it begin with A: an id that began with '-' would look like an option.
    """
    return base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")


def format_data(
    directory: Path,
    command: list[str],
    port: int,
    controller_port: int,
    properties: Mapping[str, str],
    quorum: Sequence[str] = (),
) -> None:
    """Make an empty data directory. It gets its name when it is complete. `quorum`: the arguments
    that name the cluster and its controllers; by default the broker is a new cluster of its own.
    """
    incomplete = directory / "data.new"
    shutil.rmtree(incomplete, ignore_errors=True)
    config = directory / "format.properties"
    write_properties(config, incomplete, port, controller_port, properties)
    tool = ["kafka.tools.StorageTool", "format", "--config", str(config)]
    own = quorum or ["--standalone", "--cluster-id", new_id()]
    done = subprocess.run([*command, *tool, *own], capture_output=True, text=True)
    config.unlink()
    if done.returncode:
        log = directory / "broker.log"
        log.write_text(done.stdout + done.stderr)
        raise_from_log(log, port, "could not format its directory")
    incomplete.rename(directory / "data")


def write_properties(
    path: Path, data: Path, port: int, controller_port: int, properties: Mapping[str, str]
) -> None:
    """Write the settings of a broker: those of the template, then `properties`, which win because
    they come last.
    """
    template = (FILES / "server.properties").read_text()
    for name, value in properties.items():
        template += f"{name}={value}\n"
    text = Template(template).substitute(data=data, port=port, controller_port=controller_port)
    write_atomically(path, text)


def rotate_log(directory: Path) -> Path:
    """Where the next start logs. The log of the last one is kept next to it."""
    log = directory / "broker.log"
    if log.exists():
        log.replace(directory / "broker.log.1")
    return log


@contextlib.contextmanager
def sole_owner(data: Path) -> Generator[int]:
    """A lock on the data that each process with this file descriptor holds as long as it lives.

    Kafka has its own lock, but takes it too late: a second broker has written by then.
    """
    deadline = time.monotonic() + EXIT_LIMIT_S
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


def metadata_bytes(directory: Path) -> int:
    """Size of what the controller has written of its decisions."""
    logs = (directory / "data" / "__cluster_metadata-0").glob("*.log")
    return sum(path.stat().st_size for path in logs)


def read_broker_json(directory: Path) -> dict[str, Any]:
    """What broker.json records of the last start; empty when there was none."""
    try:
        return json.loads((directory / "broker.json").read_text())
    except (OSError, ValueError):
        return {}


def write_broker_json(directory: Path, values: Mapping[str, Any]) -> None:
    write_atomically(directory / "broker.json", json.dumps(values))
