"""A run that is only read, on its Kafka or in the directory of an export."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.cli.shared import connect, load_run

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile
    from streamrl.stream.log.protocol import Log


def is_export(run: str) -> bool:
    return os.path.isdir(run) and not os.path.isfile(os.path.join("runs", run, "run.yaml"))


@contextlib.contextmanager
def open_recording(run: str) -> Iterator[tuple[RunFile, Log]]:
    """A run that is only read, and its log: on its Kafka, or in the directory of an export."""
    if is_export(run):
        from streamrl.extensions.recordings.archive import exported_run_file
        from streamrl.stream.log.parquet import FileLog

        files = FileLog(Path(run))
        yield exported_run_file(files), files
        return
    from streamrl.stream.log.kafka.log import KafkaLog

    with connect(load_run(run)) as (settings, kafka):
        yield settings, KafkaLog(kafka, settings.run)
