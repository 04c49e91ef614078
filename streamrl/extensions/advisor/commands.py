"""The command that gives advice about a run."""

from __future__ import annotations

import click

from streamrl.cli.group import overrides_option, run_argument
from streamrl.cli.shared import console
from streamrl.extensions.recordings.open_recording import open_recording


@click.command()
@run_argument
@overrides_option("Simulate the run under this setting too, as batcher.lookahead=2")
def advise(run: str, overrides: tuple[str, ...]) -> None:
    """Tell what limits a run, and what more servers, older rollouts or larger groups would give.

    Simulates the run by its newest records. RUN may be the directory of an export.
    """
    from streamrl.extensions.advisor.advice import advise
    from streamrl.extensions.advisor.reading import read_facts

    with open_recording(run) as (settings, log):
        facts, measured = read_facts(settings, log)
    limit, table = advise(settings, facts, measured, overrides)
    console().print(limit)
    console().print(table)


COMMANDS = (advise,)
