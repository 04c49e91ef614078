"""The command that serves the dashboard."""

from __future__ import annotations

import contextlib

import click

from streamrl.cli.group import run_argument
from streamrl.cli.shared import exit_with_signal, load_run, stop_on_signals
from streamrl.extensions.recordings.open_recording import is_export, open_recording


@click.command()
@run_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8650,
    show_default=True,
    help="0: any free one.",
)
@click.option(
    "--public", is_flag=True, help="Listen where other machines reach it. There is no login."
)
def dashboard(run: str, host: str, port: int, public: bool) -> None:
    """Serve a web page of a run, live or finished: the loop, curves, batches, every rollout, as it
    was at any step.

    RUN may be the directory of an export.
    """
    from functools import partial

    from streamrl.extensions.dashboard.reading import broker_down, log_of
    from streamrl.system.errors import ConfigError

    try:
        from streamrl.extensions.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs {error.name}; install streamrl[dashboard]"
        ) from None
    with stop_on_signals() as (stop, caught):
        if is_export(run):
            with open_recording(run) as (settings, log):
                serve(settings, lambda: contextlib.nullcontext(log), stop, host, port, public)
        else:
            settings = load_run(run)
            serve(
                settings,
                partial(log_of, settings, stop),
                stop,
                host,
                port,
                public,
                partial(broker_down, settings),
            )
    exit_with_signal(caught)


COMMANDS = (dashboard,)
