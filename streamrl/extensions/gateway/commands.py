"""The commands of the gateway."""

from __future__ import annotations

from functools import partial

import click

from streamrl.cli.group import index_option, metrics_options, run_argument
from streamrl.cli.shared import load_run, run_part


@click.command()
@run_argument
@index_option("Which of gateway.replicas this is; one more may join.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="Instead of gateway.port and the ones after it: where each replica has an address.",
)
@metrics_options
def gateway(run: str, index: int, port: int | None) -> None:
    """Serve model calls of agents, and record each of them."""
    from streamrl.config.topology import numbered
    from streamrl.extensions.gateway.process import main

    run_part(run, lambda settings: numbered("gateway", index), partial(main, port=port), index)


@click.command()
@run_argument
@click.argument("env", metavar="[ENV]", required=False)
@click.option(
    "--sampling",
    is_flag=True,
    help="One that samples in all sessions of the env, and does nothing else.",
)
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Time for which the key is good.",
)
def gateway_key(run: str, env: str | None, sampling: bool, days: float) -> None:
    """Print a key that opens sessions of env ENV at the gateway.

    It is signed by gateway.signing_secret, so this works wherever that is known. ENV may be left
    out where the run has one env with sessions.
    """
    from streamrl.extensions.gateway.key_command import make_key

    click.echo(make_key(load_run(run), env, "sample" if sampling else "open", days))


COMMANDS = (gateway, gateway_key)
