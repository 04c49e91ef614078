"""The command that is an assembler."""

from __future__ import annotations

from streamrl.cli.shared import part_command

COMMANDS = (
    part_command(
        "assembler",
        "Make rollouts of the sessions of agents and their rewards.",
        "streamrl.extensions.assembler.process:main",
    ),
)
