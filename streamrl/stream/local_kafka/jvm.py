"""Starting a Java process of Kafka, and telling from its log why one has ended."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NoReturn

import psutil

from streamrl.stream.local_kafka.distribution import FILES, ensure_jars, find_java
from streamrl.system.errors import BrokerError, PortTaken, StreamrlError
from streamrl.system.process_group import set_pdeathsig

# With compilation limited to its first tier (-XX:TieredStopAtLevel=1) a broker would start in 1.5 s
# instead of 2, but would take a third more CPU ever after.
JVM_OPTIONS = ("-Xms256m", "-XX:+UseSerialGC")
HEAP_MB = 512

REASONS: tuple[tuple[str, type[StreamrlError], str], ...] = (
    (
        r"No space left on device",
        BrokerError,
        "the disk that holds {directory} is full; free some space",
    ),
    (
        r"Address already in use",
        PortTaken,
        "port {port}, or the one of its controller, was taken meanwhile; "
        "try again, or give one with --port",
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


def java_command(heap_mb: int = HEAP_MB) -> list[str]:
    """The command line up to the main class. Raises BrokerError where there is no Java."""
    logging = f"-Dlog4j2.configurationFile={FILES / 'log4j2.properties'}"
    options = (*JVM_OPTIONS, f"-Xmx{heap_mb}m", logging)
    return [find_java(), *options, "-cp", f"{ensure_jars()}/*"]


def launch(command: list[str], log: Path, die_with_parent: bool, inherits: int) -> psutil.Popen:
    """Start a process that logs to `log` and inherits one file descriptor."""
    with log.open("wb") as file:
        return psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[inherits],
            # Ctrl-C in the terminal is for this process; the broker stops last.
            start_new_session=True,
            preexec_fn=set_pdeathsig(os.getpid()) if die_with_parent else None,
        )


def raise_from_log(log: Path, port: int, what: str) -> NoReturn:
    """Raise what the log of a broker gives as the reason, as one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    for pattern, error, reason in REASONS:
        if re.search(pattern, text):
            raise error(f"the broker {what}: " + reason.format(directory=log.parent, port=port))
    lines = [line for line in text.splitlines() if re.search(r"ERROR|FATAL|Exception", line)]
    last = lines[-1][:300] if lines else "nothing was logged"
    raise BrokerError(f"the broker {what}: {last}; see {log}")
