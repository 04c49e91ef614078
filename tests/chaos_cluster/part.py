"""One process of a run on a cluster: `python -m tests.chaos_cluster.part RUN.yaml NAME COMMITS`.

It is the command that everybody runs, or a learner without a model, and notes in the file COMMITS
when each of its transactions was committed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from streamrl.config.run_file import RunFile
from streamrl.stream.log.kafka.writer import KafkaWriter
from streamrl.stream.log.protocol import Log, Message, Writer
from streamrl.stream.log.retrying import RetryingWriter
from tests.chaos import learner


class Commits:
    """A file with a line for each commit: the time, of the clock that all processes share."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self) -> None:
        os.write(self._file, f"{time.monotonic():.3f}\n".encode())


def note_commits(commits: Commits) -> None:
    """Note each commit of this process from now on."""
    commit = KafkaWriter.commit

    def noted(self: KafkaWriter, messages: Sequence[Message]) -> int:
        offset = commit(self, messages)
        commits.note()
        return offset

    KafkaWriter.commit = noted


class RetryingLog:
    """A log whose writers repeat transactions, as those of the real learner do."""

    def __init__(self, log: Log, stop: threading.Event) -> None:
        self._log = log
        self._stop = stop

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    def writer(self, identity: str, changelog_topic: str) -> Writer:
        return RetryingWriter(self._log, identity, changelog_topic, stop=self._stop)


def train(run: RunFile, log: Log, stop: threading.Event) -> None:
    learner.main(run, RetryingLog(log, stop), stop)  # pyright: ignore[reportArgumentType]


def main(file: str, name: str, path: str) -> None:
    from streamrl import cli
    from streamrl.cli.shared import run_part

    note_commits(Commits(path))
    role, _, rest = name.partition("-")
    if role == "learner":
        sys.argv[1:] = [file]
        import click

        click.command()(
            click.argument("run")(lambda run: run_part(run, lambda settings: "learner-lead", train))
        )()
    elif role == "env":
        sys.argv[1:] = ["env", file, rest.rpartition("-")[0]]
        cli.main()
    else:
        sys.argv[1:] = [role, file]
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
