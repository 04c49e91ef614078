"""A whole run: start it, watch it, end it, look at it."""

from __future__ import annotations

import sys

import click

from streamrl.cli.group import metrics_options, overrides_option, run_argument
from streamrl.cli.shared import (
    connect,
    listen_override,
    load_part_run,
    load_run,
    open_log,
    print_lines,
    serving,
    stop_on_signals,
)
from streamrl.config import topology

TEMPLATE_NAMES = ("quickstart", "dataset", "env", "agent", "gsm8k")


@click.command()
@click.argument("name", metavar="NAME")
@click.option(
    "--template",
    type=click.Choice(TEMPLATE_NAMES),
    default="quickstart",
    show_default=True,
    help="What the run trains on.",
)
def new(name: str, template: str) -> None:
    """Write a commented run file NAME.yaml, and the files that belong to it.

    Templates: quickstart (two shipped envs), dataset (problems from a file), env (a class of
    yours), agent (a program that asks a model through an SDK), gsm8k (Qwen3-0.6B on one GPU).
    """
    from pathlib import Path

    from streamrl.run.orchestrator import new_run

    run_file, *others = new_run.write(template, name, Path())
    print_lines([run_file, *others], "")
    click.echo(f"next: streamrl check {run_file}; streamrl up {run_file}")
    other_templates = [name for name in TEMPLATE_NAMES if name != template]
    click.echo(f"other templates (--template): {', '.join(other_templates)}")


@click.command()
@run_argument
@click.option(
    "--memory",
    "with_memory",
    is_flag=True,
    help="Compile the learner for what its devices will hold; takes minutes.",
)
@overrides_option("Change a setting of the run file, as learner.learning_rate=3e-4")
def check(run: str, with_memory: bool, overrides: tuple[str, ...]) -> None:
    """Print what a run will do, or what is wrong with its run file. Starts nothing."""
    from streamrl.run.orchestrator.preview import preview

    facts = preview(load_run(run, overrides), with_memory)
    width = max(len(fact.subject) for fact in facts)
    subject = ""
    for fact in facts:
        shown = "" if fact.subject == subject else fact.subject
        click.echo(f"{shown:{width}}  {fact.text}")
        subject = fact.subject


@click.command()
@run_argument
@click.option("--resume", is_flag=True, help="Continue the run where it was.")
@click.option(
    "--fresh", is_flag=True, help="Archive the run of that name, if there is one, and begin anew."
)
@click.option(
    "--only",
    multiple=True,
    metavar="PART",
    help="Join a run that is started elsewhere with this part or role; may be repeated.",
)
@click.option(
    "--except",
    "excluded",
    multiple=True,
    metavar="PART",
    help="Leave out this part or role, which another machine starts; may be repeated.",
)
@click.option(
    "--on",
    "engine",
    type=click.Choice(["slurm", "ray", "kubernetes"]),
    help="Have this engine run the parts of each machine that `placement` names; on Kubernetes each"
    " part is a pod.",
)
@overrides_option("Change a setting of the run file, as learner.learning_rate=3e-4")
@metrics_options
def up(
    run: str,
    resume: bool,
    fresh: bool,
    only: tuple[str, ...],
    excluded: tuple[str, ...],
    engine: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Start all parts of a run, watch it, end it at its target."""
    from streamrl.run.engines import kubernetes, ray, slurm
    from streamrl.run.orchestrator import whole_run
    from streamrl.run.orchestrator.plan import INTERRUPTED

    if (only and excluded) or (engine and (only or excluded)):
        raise click.UsageError("--only, --except and --on exclude each other.")
    with stop_on_signals() as (stop, caught):
        settings = load_run(run, overrides)
        if engine:
            start = {"slurm": slurm.up, "ray": ray.up, "kubernetes": kubernetes.up}[engine]
            code = start(settings, run_arguments(run, overrides), stop, resume, fresh)
        else:
            code = whole_run.up(settings, stop, resume, fresh, listen_override(), only, excluded)
    sys.exit(128 + caught[0] if caught and code == INTERRUPTED else code)


def run_arguments(run: str, overrides: tuple[str, ...]) -> list[str]:
    """The run and its changed settings as another command line has them."""
    return [run, *(f"--set={override}" for override in overrides)]


@click.command()
@run_argument
@click.option(
    "--on", "engine", type=click.Choice(["slurm", "kubernetes"]), required=True, help="The engine."
)
@overrides_option("Change a setting of the run file, as learner.learning_rate=3e-4")
def render(run: str, engine: str, overrides: tuple[str, ...]) -> None:
    """Print what an engine is given to run on many machines. Submits nothing.

    slurm: a shell script that submits a job for each machine. kubernetes: the manifests of the
    parts, as a file of a kustomization.
    """
    from streamrl.run.engines import kubernetes, slurm

    settings = load_run(run, overrides)
    if engine == "slurm":
        text = slurm.render(settings, run_arguments(run, overrides))
    else:
        text = kubernetes.render(settings)
    click.echo(text, nl=False)


@click.command()
@run_argument
@overrides_option("Change a setting of the run file, as model.path=Qwen/Qwen3-0.6B")
def fetch(run: str, overrides: tuple[str, ...]) -> None:
    """Download the models and data sets that a run names on the Hugging Face hub.

    `up` does so by itself. Prints each of them with its commit, as a run file may name it.
    """
    from streamrl.run.orchestrator.downloads import download

    _, snapshots = download(load_run(run, overrides))
    print_lines(
        [f"{snapshot.name} in {snapshot.directory}" for snapshot in snapshots],
        "the run names nothing on the hub",
    )


@click.command()
@run_argument
@metrics_options
def orchestrator(run: str) -> None:
    """Watch a run whose parts were started by hand; end with its report."""
    from streamrl.run.orchestrator import process
    from streamrl.run.orchestrator.plan import INTERRUPTED

    name = topology.ORCHESTRATOR.name
    with stop_on_signals() as (stop, caught):
        settings = load_part_run(run)
        with open_log(settings, name) as log, serving(settings, log, name) as watched:
            code = process.main(settings, watched, stop)
    sys.exit(128 + caught[0] if caught and code == INTERRUPTED else code)


@click.command()
@run_argument
def down(run: str) -> None:
    """Stop a run that `up` started, in whatever terminal."""
    from streamrl.run.orchestrator import run_directory

    settings = load_run(run)
    click.echo(f"run {settings.run} stopped (process {run_directory.stop(settings)})")


@click.command()
@run_argument
def status(run: str) -> None:
    """Show parts, lag, versions and the last step, of a live run or a stopped one."""
    from streamrl.run.monitoring.show_status import show_status

    show_status(load_run(run))


@click.command()
@run_argument
def report(run: str) -> None:
    """Make report.json and reward.png again from the topics."""
    from streamrl.run.monitoring.report import summary_line, write_report
    from streamrl.stream.log.kafka.log import KafkaLog

    with connect(load_run(run)) as (settings, kafka):
        click.echo(summary_line(write_report(settings, KafkaLog(kafka, settings.run))))


COMMANDS = (
    new,
    check,
    up,
    render,
    fetch,
    orchestrator,
    down,
    status,
    report,
)
