"""One part of a chaos run, as a process: `python -m tests.chaos.part RUN.yaml NAME LOG`, with a LOG
of `LOGS`. Ends as `streamrl` does.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
from dataclasses import replace
from typing import Any

from streamrl.cli.shared import LOG_FORMAT
from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.processors import processors_of
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor import processor
from streamrl.system.errors import StreamrlError
from streamrl.system.signals import stop_on
from tests.chaos import env, learner
from tests.chaos.watched import Note, UntransactedLog, WatchedLog

LOGS = {"transactions": WatchedLog, "no-transactions": UntransactedLog}
SNAPSHOT_EVENTS = 300  # many within a run, so that kills meet them


def main(run: RunFile, log: Log, stop: threading.Event, name: str) -> None:
    """Be that part."""
    folds: dict[str, Any] = processors_of(run)
    if name in folds:
        part = folds[name]
        processor.run_processor(log, replace(part, snapshot_events=SNAPSHOT_EVENTS), stop)
    elif name == "learner":
        learner.main(run, log, stop)
    else:
        env.main(run, log, stop, name.split("-")[1])


def note_of(run: RunFile, name: str) -> Note:
    return Note(run.directory / "notes" / name)


if __name__ == "__main__":
    file, mine, kind = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    faulthandler.register(signal.SIGUSR1)  # where does it hang?
    stopped = stop_on([signal.SIGTERM])
    try:
        loaded = run_file.load(file)
        note = note_of(loaded, mine)
        note.begin()
        main(loaded, LOGS[kind](connect.client_settings(loaded), loaded.run, note), stopped, mine)
    except StreamrlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
