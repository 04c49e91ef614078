"""The whole command `streamrl`: the group of all commands, in the order in which `--help` lists
them.
"""

from streamrl.cli import parts, run, topics
from streamrl.cli.group import cli
from streamrl.config.extensions import modules_called

__all__ = ["cli"]

for module in (run, topics, parts, *(found for _, found in modules_called("commands"))):
    for command in module.COMMANDS:
        cli.add_command(command)
