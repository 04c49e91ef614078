"""What commands share: the run and its log, signals, and what is printed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from streamrl.cli.group import index_option, metrics_options, run_argument
from streamrl.system.errors import TopicMissing
from streamrl.system.signals import stop_on
from streamrl.system.text import escaped

if TYPE_CHECKING:
    from rich.console import Console

    from streamrl.config.run_file import RunFile
    from streamrl.run.monitoring.http import ListenOverride
    from streamrl.stream.log.protocol import Log

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Libraries whose INFO lines are noise.
QUIET = ("httpx", "httpx2", "httpcore", "httpcore2", "jax", "matplotlib", "openai", "urllib3")


def run_part(
    run: str, part: Callable[[RunFile], str], main: Callable[..., None], *arguments: Any
) -> None:
    """Run a part under the name that `part` gives, until a signal, or until it fails."""
    from streamrl.system.tuning import tune_process

    tune_process()
    with stop_on_signals() as (stop, caught):
        settings = load_part_run(run)
        name = part(settings)
        with open_log(settings, name) as log, serving(settings, log, name) as watched:
            main(settings, watched, stop, *arguments)
    exit_with_signal(caught)


def part_command(role: str, help: str, main: str, index: str = "") -> click.Command:
    """The command that is a part of a role, by the MODULE:NAME of its `main`. `index`: the help of
    `--index`, which `main` takes; empty: the role has one part.
    """

    def command(run: str, **options: int) -> None:
        from streamrl.config.plugins import import_path

        name = "-".join([role, *map(str, options.values())])
        run_part(run, lambda settings: name, import_path(main, role, ()), *options.values())

    command = metrics_options(command)
    if index:
        command = index_option(index)(command)
    return click.command(role, help=help)(run_argument(command))


def serving(settings: RunFile, log: Log, part: str) -> contextlib.AbstractContextManager[Log]:
    """The log of a part that serves /livez, /readyz and /metrics."""
    from streamrl.run.monitoring.http import serving

    return serving(settings, log, part, listen_override())


def listen_override() -> ListenOverride:
    """The address to serve the pages at, if the command line or the environment gives it."""
    from streamrl.run.monitoring.http import ListenOverride

    meta = click.get_current_context().meta
    return ListenOverride(meta.get("streamrl.metrics_host"), meta.get("streamrl.metrics_port"))


def exit_with_signal(caught: list[int]) -> None:
    """Exit as shells expect it after Ctrl-C. SIGTERM is an ordinary end."""
    if signal.SIGINT in caught:
        sys.exit(128 + signal.SIGINT)


def load_run(run: str, overrides: tuple[str, ...] = ()) -> RunFile:
    from streamrl.run.orchestrator.run_directory import resolve_run

    return resolve_run(run, overrides)


def load_part_run(run: str) -> RunFile:
    """The run of a part that is started here, and not by `up`."""
    from streamrl.run.orchestrator.downloads import check_commits

    settings = load_run(run)
    check_commits(settings)
    return settings


@contextlib.contextmanager
def connect(settings: RunFile) -> Iterator[tuple[RunFile, dict[str, Any]]]:
    """librdkafka settings of the run's Kafka."""
    from streamrl.stream.local_kafka.connect import connect_or_start

    with connect_or_start(settings) as kafka:
        yield settings, kafka


@contextlib.contextmanager
def open_log(settings: RunFile, part: str) -> Iterator[Log]:
    """The run's log on a Kafka that is running and has its topics. The broker knows the part by
    its `client.id`, which is its transactional id, too.
    """
    from streamrl.stream.local_kafka.connect import client_settings
    from streamrl.stream.log.kafka.log import KafkaLog

    own = {"client.id": f"{settings.run}.{part}"}
    log = KafkaLog({**own, **client_settings(settings)}, settings.run)
    if not log.topics():
        raise TopicMissing(
            f"run {settings.run!r} has no topics on {log.address}; create them with `streamrl"
            " topics apply RUN.yaml`"
        )
    try:
        yield log
    finally:
        log.close()


def log_of(settings: RunFile, name: str) -> Log:
    """The log of another run on the Kafka of this one."""
    from streamrl.stream.local_kafka.connect import client_settings
    from streamrl.stream.log.kafka.log import KafkaLog

    return KafkaLog(client_settings(settings), name)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """An event that SIGTERM, Ctrl-C and the death of the terminal set, and the signals that came. A
    second Ctrl-C is a KeyboardInterrupt.
    """
    start_logging()
    caught = list[int]()

    def note(number: int) -> None:
        if number == signal.SIGINT and number in caught:
            raise KeyboardInterrupt
        # no process reads any more, and a write to a terminal that is gone is an error
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
        caught.append(number)

    stop = stop_on((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), note)
    yield stop, caught


def start_logging() -> None:
    import logging

    level = os.environ.get("STREAMRL_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise click.UsageError(
            f"STREAMRL_LOG is {level!r}; give one of DEBUG, INFO, WARNING, ERROR"
        )
    logging.basicConfig(
        level=level, format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )

    class Escaped(logging.Formatter):
        """Escapes control characters, because a line may quote what others have written."""

        def format(self, record: logging.LogRecord) -> str:
            return escaped(super().format(record))

    for handler in logging.getLogger().handlers:
        handler.setFormatter(Escaped(LOG_FORMAT, "%Y-%m-%d %H:%M:%S"))
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def print_lines(lines: list[Any], otherwise: str) -> None:
    click.echo("\n".join(map(str, lines)) if lines else otherwise)


def console(width: int | None = None) -> Console:
    """The console on which tables are printed. Long lines stay whole, so that they can be piped."""
    from rich.console import Console

    return Console(width=width, soft_wrap=True)
