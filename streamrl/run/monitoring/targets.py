"""The file with a part's address, where Prometheus finds it (`file_sd_configs`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from socket import gethostname
from typing import NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.stream.log.instrumented import InstrumentedLog
from streamrl.system.files import write_atomically

logger = logging.getLogger(__name__)

# The directory next to the runs with a file for each part. Prometheus's `file_sd_configs` finds the
# files: its paths may have one * only, at the end.
TARGETS = ".targets"


class Address(NamedTuple):
    """Where a part listens. Port 0 means any free port."""

    host: str
    port: int


def targets_file(run: RunFile, part: str) -> Path:
    """The file with the part's address, in the format of Prometheus's `file_sd_configs`."""
    return run.directory.parent / TARGETS / f"{run.run}.{part}.json"


def write_targets(file: Path, run: str, address: Address, log: InstrumentedLog, level: int) -> None:
    """Write the part's address to `file`. A failure is only logged, with this level.

    Without the file, Prometheus can be told of a fixed port.
    """
    host = gethostname() if address.host in ("0.0.0.0", "::") else address.host
    target = f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"
    labels = {"run": run, "part": log.part}
    entries: list[dict[str, object]] = [{"targets": [target], "labels": labels}]
    for path in log.pages:
        page_labels = {**labels, "page": path.rpartition("/")[2], "__metrics_path__": path}
        entries.append({"targets": [target], "labels": page_labels})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(entries, indent=1))
    except OSError as error:
        logger.log(
            level,
            "%s cannot be written (%s): Prometheus has to be told of %s",
            file,
            error.strerror,
            target,
        )


def remove_targets(run: RunFile, parts: Iterable[str]) -> None:
    """Remove the address files of these parts of the run, because a part that is killed leaves its
    own.

    A part that is alive writes its file again.
    """
    for part in parts:
        targets_file(run, part).unlink(missing_ok=True)
