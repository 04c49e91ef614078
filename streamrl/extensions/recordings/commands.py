"""A recorded run: account for it, run it again, fork it, export it, mend it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from streamrl.cli.group import overrides_option, run_argument
from streamrl.cli.shared import connect, console, load_run
from streamrl.extensions.recordings.open_recording import open_recording


@click.command()
@run_argument
@click.option(
    "--by-version",
    is_flag=True,
    help=(
        "A row for each policy version that made rollouts, and for each batch which versions"
        " made it."
    ),
)
@click.option(
    "--scorer",
    metavar="NAME@VERSION",
    help="Instead: which rollouts, batches and policy versions had rewards of this scorer.",
)
def audit(run: str, by_version: bool, scorer: str | None) -> None:
    """Account for every rollout: published = fates + in flight. RUN may be the directory of an
    export.
    """
    from streamrl.extensions.recordings.new_rewards import parse_scorers
    from streamrl.extensions.recordings.show_audit import show_audit
    from streamrl.extensions.recordings.show_scorer import show_scorer

    with open_recording(run) as (settings, log):
        if scorer is not None:
            for each in parse_scorers(scorer):
                show_scorer(settings, log, each, console())
            return
        code = show_audit(settings, log, by_version, console())
    sys.exit(code)


@click.command()
@run_argument
@click.option("--part", metavar="NAME", help="Only this one: buffer or batcher.")
@click.option("--step", type=int, help="Stop there and print the state.")
@click.option(
    "--weights",
    is_flag=True,
    help=(
        "Train again as well, and compare the hash of every policy version; on the machine that"
        " made them."
    ),
)
@click.option(
    "--from",
    "first",
    type=click.IntRange(0),
    help="With --weights: begin with the checkpoint of this version.",
)
def replay(run: str, part: str | None, step: int | None, weights: bool, first: int | None) -> None:
    """Run the journals again and compare every group and batch, bit for bit. RUN may be the
    directory of an export.
    """
    from streamrl.extensions.recordings.replay_weights import show_weights
    from streamrl.extensions.recordings.show_replay import show_replay

    if first is not None and not weights:
        raise click.UsageError("--from needs --weights.")
    with open_recording(run) as (settings, log):
        code = show_replay(settings, log, part, step, console())
        if weights and not code:
            code = show_weights(settings, log, first, console())
    sys.exit(code)


@click.command()
@run_argument
@click.option(
    "--reward",
    required=True,
    metavar="NAME[=KIND]",
    help=(
        "The reward's name and its function: FILE.py:NAME, MODULE:NAME or a shipped one. NAME alone"
        " is a reward of the run file."
    ),
)
@click.option("--env", default="", metavar="NAME", help="Which env; default: the only one.")
@click.option(
    "--version",
    default="",
    metavar="TEXT",
    help="The scorer's version; default: a hash of the function's file.",
)
@overrides_option("Change a setting, as envs.NAME.env_timeout_s=60")
def rescore(run: str, reward: str, env: str, version: str, overrides: tuple[str, ...]) -> None:
    """Give the recorded rollouts of an env a new reward, as records on rewards.ENV.

    What the run trained on stays as it is. A rollout that has a reward of this scorer and version
    is skipped, so an interrupted command continues.
    """
    from streamrl.extensions.recordings.rescore_command import rescore_command

    with connect(load_run(run, overrides)) as (settings, kafka):
        rescore_command(settings, kafka, reward, env, version, console())


@click.command()
@run_argument
@click.option(
    "--at",
    "version",
    type=click.IntRange(0),
    required=True,
    help="The policy version that it begins with.",
)
@click.option("--as", "name", required=True, help="Name of the new run.")
@overrides_option("Change a setting, as learner.loss=clipped-ratio")
@click.option(
    "--rollouts",
    is_flag=True,
    help="Take along the rollouts that were recorded and not trained on by then.",
)
@click.option(
    "--retrain",
    is_flag=True,
    help=(
        "Train again on all rollouts recorded from there on, without sampling, as with a teacher"
        " or a loss that the run did not have."
    ),
)
@click.option(
    "--rewards",
    metavar="NAME@VERSION[,...]",
    default="",
    help="The same, with the rewards of these scorers (`streamrl rescore`).",
)
def fork(
    run: str,
    version: int,
    name: str,
    overrides: tuple[str, ...],
    rollouts: bool,
    retrain: bool,
    rewards: str,
) -> None:
    """Make a new run that begins with a version of RUN, live or stopped, under other settings. RUN
    is only read.
    """
    import time

    from streamrl.extensions.recordings.fork import ForkRequest, Retrain, fork_command
    from streamrl.extensions.recordings.new_rewards import parse_scorers

    if rollouts and (retrain or rewards):
        given = "--rewards" if rewards else "--retrain"
        raise click.UsageError(f"{given} takes all rollouts along; leave --rollouts out.")
    inherited = "untrained" if rollouts else "none"
    if retrain or rewards:
        inherited = Retrain(tuple(parse_scorers(rewards)) if rewards else ())
    request = ForkRequest(load_run(run), name, version, overrides, inherited)
    fork_command(request, time.time(), console())


@click.command()
@run_argument
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def export(run: str, directory: Path) -> None:
    """Write all topics of a run to Parquet files in DIR: to query, to keep, to replay without a
    broker.
    """
    from streamrl.extensions.recordings.archive_commands import export_command

    with open_recording(run) as (settings, log):
        export_command(settings, log, directory, console())


@click.command("import")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--as",
    "name",
    metavar="NEW",
    default="",
    help="Name of the run that is made; default: the one it had.",
)
def import_(directory: Path, name: str) -> None:
    """Make a run of an export, every record at its old offset."""
    from streamrl.extensions.recordings.archive_commands import import_command

    import_command(directory, name, console())


@click.command("export-model")
@run_argument
@click.option("--version", type=click.IntRange(0), help="Which policy; default: the newest.")
@click.option(
    "--to",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to write it.",
)
@click.option(
    "--push",
    "repository",
    metavar="OWNER/NAME",
    help="Upload it to the Hugging Face hub, with the token in HF_TOKEN. A new one is private.",
)
@click.option(
    "--adapter",
    is_flag=True,
    help="Of a run that trains adapters: the adapter alone, as PEFT loads it.",
)
def export_model(
    run: str,
    version: int | None,
    directory: Path | None,
    repository: str | None,
    adapter: bool,
) -> None:
    """Write a policy version as a directory that transformers and vLLM load: weights, settings,
    tokenizer, chat template.

    A version whose weights are deleted is computed again from the recorded batches. An adapter is
    merged with its base.
    """
    from streamrl.extensions.recordings.export_model import ModelDestination, export_model_command

    if not (directory or repository):
        raise click.UsageError("Give --to, --push, or both.")
    destination = ModelDestination(directory, repository)
    with open_recording(run) as (settings, log):
        export_model_command(settings, log, version, destination, console(), adapter)


@click.group("dead-letters")
def dead_letters() -> None:
    """Records that could not be used: list them, show one, put them back."""


@dead_letters.command("list")
@run_argument
def list_letters(run: str) -> None:
    """Count dead letters, by topic and cause."""
    from streamrl.extensions.recordings.show_dead_letters import show_list
    from streamrl.stream.log.kafka.log import KafkaLog

    with connect(load_run(run)) as (settings, kafka):
        show_list(KafkaLog(kafka, settings.run), console())


@dead_letters.command("show")
@run_argument
@click.argument("place", metavar="TOPIC[PARTITION]@OFFSET")
def show_letter(run: str, place: str) -> None:
    """Show one record: the cause, its headers, its fields as far as they can be read, its bytes."""
    from streamrl.extensions.recordings import show_dead_letters
    from streamrl.stream.log.kafka.log import KafkaLog

    with connect(load_run(run)) as (settings, kafka):
        show_dead_letters.show_letter(KafkaLog(kafka, settings.run), place, console())


@dead_letters.command("retry")
@run_argument
@click.argument("which", metavar="[TOPIC | TOPIC[PARTITION]@OFFSET]", required=False)
@click.option("--cause", default="", help="Only those whose cause contains this.")
@click.option("--all", "everything", is_flag=True, help="Of every topic and cause.")
def retry_letters(run: str, which: str | None, cause: str, everything: bool) -> None:
    """Put records back to the topic they came from, each at most once.

    For records whose cause is repaired: a part that did not know a field, or a version that was not
    announced yet. A record that is refused again is a new letter.
    """
    from streamrl.extensions.recordings.show_dead_letters import retry_command
    from streamrl.stream.log.kafka.log import KafkaLog

    if not (which or cause or everything):
        raise click.UsageError(
            "Name what to put back: a topic, the place of one record, --cause, or --all."
        )
    with connect(load_run(run)) as (settings, kafka):
        retry_command(KafkaLog(kafka, settings.run), which, cause, console())


@click.command("skip")
@run_argument
@click.argument("place", metavar="TOPIC[PARTITION]@OFFSET")
@click.option("--yes", is_flag=True, help="Do not ask.")
def skip(run: str, place: str, yes: bool) -> None:
    """Delete a record that ends every part that fetches it, with all before it in its partition.

    The last resort: parts step over records that they cannot read by themselves. The record gets a
    dead letter with its place.
    """
    from streamrl.extensions.recordings import skip as skipping
    from streamrl.stream.log.kafka.log import KafkaLog

    with connect(load_run(run)) as (settings, kafka):
        if not yes:
            click.confirm(
                f"Delete the record at {place} and all records of its partition before it?",
                abort=True,
            )
        before = skipping.skip(KafkaLog(kafka, settings.run), place)
    click.echo(
        f"{place} is deleted, and {before:,} offsets before it. Parts that hold records of these "
        "start with --set topics.on_removed=expire"
    )


COMMANDS = (
    audit,
    replay,
    rescore,
    fork,
    export,
    import_,
    export_model,
    dead_letters,
    skip,
)
