"""The broker of a run and its topics."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamrl.cli.group import RunName, run_argument
from streamrl.cli.shared import (
    connect,
    console,
    exit_with_signal,
    load_run,
    print_lines,
    start_logging,
    stop_on_signals,
)

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile


@click.command()
@click.argument("run", metavar="[RUN]", type=RunName(), required=False)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of 127.0.0.1; 0: the one of last time, or any free one. Of a cluster: the first's.",
)
@click.option(
    "--brokers",
    type=click.Choice(("1", "3")),
    help="3: a cluster, which survives the death of a broker. Default: what the run has, else 1.",
)
@click.option(
    "--download", is_flag=True, help="Only fetch Kafka, so that later starts need no network."
)
def broker(run: str | None, port: int, brokers: str | None, download: bool) -> None:
    """Be the run's own Apache Kafka, with its data in the run's directory."""
    from streamrl.stream.local_kafka import distribution
    from streamrl.stream.local_kafka.connect import serve

    if download:
        start_logging()
        click.echo(distribution.ensure_jars())
        return
    if run is None:
        raise click.UsageError("Missing argument 'RUN'.")
    with stop_on_signals() as (stop, caught):
        serve(load_run(run), stop, port, int(brokers or 0))
    exit_with_signal(caught)


kafka_option = click.option(
    "--kafka",
    "properties",
    type=click.Path(path_type=Path),
    help="A file with the settings of the cluster and an administrator's credentials, as Kafka's"
    " commands take it. Nothing that the run file has about the cluster is used then.",
)


@contextlib.contextmanager
def _cluster(run: str, properties: Path | None) -> Iterator[tuple[RunFile, dict[str, Any]]]:
    """The run file and the settings of the cluster that a command works on."""
    from streamrl.stream.local_kafka.connect import properties_file

    settings = load_run(run)
    if properties is not None:
        yield settings, properties_file(properties)
        return
    with connect(settings) as (settings, kafka):
        yield settings, kafka


@click.command()
@run_argument
@kafka_option
def doctor(run: str, properties: Path | None) -> None:
    """Try on the run's Kafka what its parts do there, and report what is missing.

    What is tried has names that begin with RUN.doctor-, and is deleted at the end. Topics of the
    run are not touched. The exit code is 2 if anything is missing.
    """
    from rich.text import Text

    from streamrl.run.monitoring.cells import quoted
    from streamrl.stream.local_kafka.connect import local_directory
    from streamrl.stream.log.kafka.doctor import CHECKS, Trial, examine
    from streamrl.system.errors import ConfigError

    width = max(map(len, CHECKS))
    styles = {"ok": "green", "missing": "bold red", "unseen": "yellow"}
    missing: list[str] = []
    with (
        stop_on_signals() as (stop, caught),
        _cluster(run, properties) as (settings, kafka),
        contextlib.closing(
            examine(Trial(settings, kafka, data=None if properties else local_directory(settings)))
        ) as findings,
    ):
        for finding in findings:
            status = (f"{finding.status:7}", styles[finding.status])
            line = Text.assemble(f"{finding.check:{width}}  ", status, "  ", quoted(finding.text))
            console().print(line)
            if finding.status == "missing":
                missing.append(finding.check)
            if stop.is_set():
                sys.exit(128 + caught[0])
    if missing:
        raise ConfigError(f"{kafka['bootstrap.servers']} needs changes: {', '.join(missing)}")


@click.group()
def topics() -> None:
    """Topics as code: render, plan, apply, diff, delete, and who may use them."""


@topics.command()
@run_argument
@click.option("--cluster", default="streamrl", show_default=True, help="Name of Strimzi's Kafka.")
@click.option(
    "--tiered",
    type=click.FloatRange(min=0, min_open=True),
    metavar="HOURS",
    help="Put rollouts, turns, groups and batches into tiered storage: brokers keep them for HOURS,"
    " the remote storage for the rest of topics.retention_hours.",
)
def render(run: str, cluster: str, tiered: float | None) -> None:
    """Write the run's KafkaTopics, for kubectl."""
    from streamrl.stream.log import topics as planned

    click.echo(planned.render(load_run(run), cluster, tiered), nl=False)


@topics.command()
@run_argument
def plan(run: str) -> None:
    """List the topics that the run wants; asks no broker."""
    from streamrl.stream.log import topics as planned

    for topic in planned.plan(load_run(run)):
        click.echo(
            f"{topic.name}  partitions {topic.partitions}, replicas {topic.replicas} "
            f" {' '.join(f'{k}={v}' for k, v in topic.config.items())}"
        )


@topics.command()
@run_argument
@kafka_option
def apply(run: str, properties: Path | None) -> None:
    """Make the broker's topics as planned."""
    from streamrl.stream.log.kafka import topic_changes

    with _cluster(run, properties) as (settings, kafka):
        print_lines(topic_changes.apply(settings, kafka), "nothing to change")


@topics.command()
@run_argument
@kafka_option
def diff(run: str, properties: Path | None) -> None:
    """Show what apply would do; exit code 1 if anything."""
    from streamrl.stream.log.kafka import topic_changes

    with _cluster(run, properties) as (settings, kafka):
        changes = topic_changes.diff(settings, kafka)
    print_lines(changes, "no difference")
    sys.exit(1 if changes else 0)


@topics.command()
@run_argument
@click.option(
    "--apply", "applied", is_flag=True, help="Have the broker allow it; needs a user who may."
)
@click.option("--render", "rendered", is_flag=True, help="Write KafkaUsers, for kubectl.")
@click.option(
    "--cluster",
    default="streamrl",
    show_default=True,
    help="With --render: name of Strimzi's Kafka.",
)
@click.option(
    "--guest",
    "guests",
    multiple=True,
    metavar="RUN",
    help="With --render: a run of inference.also_serves, whose run file has this one in"
    " inference.served_by.",
)
@kafka_option
def acls(
    run: str,
    applied: bool,
    rendered: bool,
    cluster: str,
    guests: tuple[str, ...],
    properties: Path | None,
) -> None:
    """List what each role may do on the broker, or make it so.

    --apply needs --kafka: the credentials of a user who may change rules are not sent to
    the cluster that a run file names.
    """
    from streamrl.stream.local_kafka.connect import properties_file
    from streamrl.stream.log.kafka import acls as access

    if applied and rendered:
        raise click.UsageError("--apply and --render exclude each other.")
    if guests and not rendered:
        raise click.UsageError(
            "--guest goes with --render. Elsewhere the run file of the guest gives the rule."
        )
    settings = load_run(run)
    if rendered:
        click.echo(access.render(settings, cluster, [load_run(name) for name in guests]), nl=False)
        return
    if not applied:
        print_lines(access.in_words(settings), "")
        return
    if properties is None:
        raise click.UsageError(
            "--apply needs --kafka FILE, with bootstrap.servers and an administrator's credentials."
        )
    print_lines(access.apply(settings, properties_file(properties)), "")


@topics.command()
@run_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@kafka_option
def delete(run: str, yes: bool, properties: Path | None) -> None:
    """Delete all topics of the run, and what they hold."""
    from streamrl.stream.log.kafka import topic_changes

    with _cluster(run, properties) as (settings, kafka):
        if not yes:
            click.confirm(
                f"Delete every topic of run {settings.run} on {kafka['bootstrap.servers']}, with"
                " all records?",
                abort=True,
            )
        print_lines(topic_changes.delete(settings, kafka), "there are none")


COMMANDS = (
    broker,
    doctor,
    topics,
)
