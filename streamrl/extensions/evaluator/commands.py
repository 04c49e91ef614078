"""The commands that evaluate: a part of a run, and an evaluation that is asked for."""

from __future__ import annotations

import click

from streamrl.cli.group import overrides_option, run_argument
from streamrl.cli.shared import (
    connect,
    console,
    exit_with_signal,
    load_run,
    part_command,
    stop_on_signals,
)


@click.command("eval")
@run_argument
@click.option(
    "--version",
    "asked",
    type=click.IntRange(0),
    multiple=True,
    help="Of the policy; may be repeated. Default: the newest.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Every announced version whose weights are kept."
)
@click.option(
    "--env",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this one of eval.envs; may be repeated.",
)
@overrides_option("Change a setting, as eval.envs.NAME.samples=16")
@click.option(
    "--list", "listed", is_flag=True, help="Show what evaluations there are; evaluate nothing."
)
def evaluate(
    run: str,
    asked: tuple[int, ...],
    everything: bool,
    names: tuple[str, ...],
    overrides: tuple[str, ...],
    listed: bool,
) -> None:
    """Have policy versions of a live or stopped run solve held-out problems: pass@k, with 95 %
    confidence intervals.

    It has its own server. Its results go to the topic evals; nothing is trained on it.
    """
    from streamrl.extensions.evaluator.show import show_eval, show_recorded
    from streamrl.run.monitoring.show_status import output_width
    from streamrl.stream.log.kafka.log import KafkaLog

    if everything and asked:
        raise click.UsageError("--version and --all exclude each other.")
    with (
        stop_on_signals() as (stop, caught),
        connect(load_run(run, overrides)) as (settings, kafka),
    ):
        log = KafkaLog(kafka, settings.run)
        wide = console(width=output_width())
        if listed:
            show_recorded(settings, log, names, wide)
        else:
            show_eval(settings, log, asked, everything, names, stop, wide)
    exit_with_signal(caught)


COMMANDS = (
    part_command(
        "evaluator",
        "Evaluate every n-th policy version on held-out problems.",
        "streamrl.extensions.evaluator.process:main",
    ),
    evaluate,
)
