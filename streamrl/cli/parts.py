"""The parts of a run, in the order of the loop."""

from __future__ import annotations

import click

from streamrl.cli.group import (
    RunName,
    cli,
    index_option,
    metrics_options,
    overrides_option,
    run_argument,
)
from streamrl.cli.shared import log_of, part_command, run_part


@click.command()
@click.argument("run", metavar="[RUN]", type=RunName())
@click.argument("name", metavar="NAME", required=False)
@index_option("Which of the env's replicas this is.")
@metrics_options
def env(run: str, name: str | None, index: int) -> None:
    """Pose problems, sample and publish rollouts, as env NAME of the run.

    NAME may be its kind, as verifiers:MODULE. Without RUN, of the run in runs/ that has such an
    env.
    """
    from streamrl.config.topology import env_part
    from streamrl.envs.catalog import resolve_env
    from streamrl.envs.process import main
    from streamrl.run.orchestrator.run_directory import with_env

    if name is None:
        run, name = with_env(run), run
    asked = name
    run_part(run, lambda settings: env_part(resolve_env(settings, asked), index), main, name, index)


@click.command()
@run_argument
@click.argument("name", metavar="NAME")
@metrics_options
def host(run: str, name: str) -> None:
    """Be all envs of the run that have `host: NAME`, in one process."""
    from streamrl.config.topology import host_part
    from streamrl.envs.process import host_main

    run_part(run, lambda settings: host_part(name), host_main, name)


@click.command("envs")
def list_envs() -> None:
    """List the envs and rewards that a run file may name, with the package of each.

    An installed package adds its own by the entry points streamrl.envs and streamrl.rewards.
    """
    from streamrl.envs.catalog import known_envs, known_rewards

    for what, known in (("env", known_envs()), ("reward", known_rewards())):
        for name, plugin in known.items():
            click.echo(f"{what:6}  {name:16}  {plugin.package}: {plugin.path}")


@click.command()
@run_argument
@index_option("Which of buffer.shards this is.")
@metrics_options
def buffer(run: str, index: int) -> None:
    """Turn rollouts into scored groups."""
    from streamrl.buffer.process import main
    from streamrl.config.topology import buffer_part

    run_part(run, lambda settings: buffer_part(index, settings.buffer.shards), main, index)


@click.command()
@run_argument
@click.option(
    "--name", default=None, help="Of the learner; default: the lead, learner.name of the run file."
)
@click.option(
    "--at",
    "version",
    type=click.IntRange(0),
    help="A second learner: begin as the lead was at this version. Default: as the run began.",
)
@overrides_option("A second learner: a learner.* setting of this learner only")
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="This is one of several processes that are the learner, whose first waits there.",
)
@click.option("--processes", type=click.IntRange(1), help="With --coordinator: how many.")
@click.option(
    "--index",
    type=click.IntRange(0),
    help="With --coordinator: which of them this is; 0 announces the versions.",
)
@metrics_options
def learner(
    run: str,
    name: str | None,
    version: int | None,
    overrides: tuple[str, ...],
    coordinator: str | None,
    processes: int | None,
    index: int | None,
) -> None:
    """Train on batches, announce policy versions.

    With another --name it is a second learner: it follows the same batches, and no part follows
    its versions.
    """
    several = _one_of_several(coordinator, processes, index)
    from streamrl.config.topology import learner_identity, learner_process
    from streamrl.learner.parallel.distributed import ProcessRank
    from streamrl.learner.process import main

    rank = ProcessRank(*several) if several else None
    run_part(
        run,
        lambda settings: learner_process(
            learner_identity(name or settings.learner.name), index or 0
        ),
        main,
        name,
        version,
        overrides,
        rank,
    )


def _one_of_several(
    coordinator: str | None, processes: int | None, index: int | None
) -> tuple[str, int, int] | None:
    """Coordinator, number of processes and index of one process of a learner. None if the learner
    is one process.
    """
    if coordinator is None and processes is None and index is None:
        return None
    if coordinator is None or processes is None or index is None or index >= processes:
        raise click.UsageError(
            "--coordinator, --processes and --index belong together, and the processes are numbered"
            " from 0."
        )
    return coordinator, processes, index


@click.command()
@run_argument
@index_option("Which of the pool's servers this is; one more than it has may join.")
@click.option(
    "--pool", default="generation", help="Of inference.pools in the run file.", show_default=True
)
@metrics_options
def inference(run: str, index: int, pool: str) -> None:
    """Own one vLLM: keep it on the newest policy version."""
    from streamrl.config.topology import inference_part
    from streamrl.inference.servers.process import main

    run_part(run, lambda settings: inference_part(pool, index), main, index, pool, log_of)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell's completion script.

    \b
    bash:  eval "$(streamrl completion bash)"      in ~/.bashrc
    zsh:   eval "$(streamrl completion zsh)"       in ~/.zshrc, after compinit
    fish:  streamrl completion fish | source       in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "streamrl", "_STREAMRL_COMPLETE").source())


COMMANDS = (
    env,
    host,
    list_envs,
    buffer,
    part_command("batcher", "Turn scored groups into batches.", "streamrl.batcher.process:main"),
    learner,
    inference,
    completion,
)
