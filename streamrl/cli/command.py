"""The whole command `streamrl`: the group of all commands, in the order in which `--help` lists
them.
"""

from streamrl.cli import parts, run, topics
from streamrl.cli.group import cli
from streamrl.config.extensions import modules_called

__all__ = ["cli"]

cli.add_section("Runs", run.COMMANDS)
cli.add_section("Kafka", topics.COMMANDS)
cli.add_section("Parts", parts.COMMANDS)
for _, module in modules_called("commands"):
    cli.add_section("Extensions", module.COMMANDS)
