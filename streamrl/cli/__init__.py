"""The command line: `streamrl ROLE RUN.yaml`. Each command imports its room when it runs, so that
`--help` and completion are instant.

A StreamrlError is one line on stderr and its exit code; `--debug` adds the traceback. SIGTERM and
Ctrl-C let a part finish its batch; a second Ctrl-C does not.
"""

from streamrl.cli import parts, recordings, run, topics
from streamrl.cli.group import cli

__all__ = ["cli", "main"]

# The order in which `--help` lists the commands.
for command in (*run.COMMANDS, *recordings.COMMANDS, *topics.COMMANDS, *parts.COMMANDS):
    cli.add_command(command)


def main() -> None:
    cli(prog_name="streamrl")
