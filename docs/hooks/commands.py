"""Every command of `streamrl` with its arguments and options, as its help has them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from streamrl.cli.command import cli


def pages() -> str:
    """All commands in Markdown, in the order of `streamrl --help`."""
    return "\n".join(page(path, command) for path, command in commands((), cli))


def commands(
    path: tuple[str, ...], group: click.Group
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Those that do something, with the words that call them."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands((*path, name), command)
        else:
            yield (*path, name), command


def page(path: tuple[str, ...], command: click.Command) -> str:
    parent = click.Context(cli, info_name=" ".join(("streamrl", *path[:-1])))
    context = click.Context(
        command, info_name=path[-1], parent=parent, max_content_width=110, terminal_width=110
    )
    return f"## {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n"
