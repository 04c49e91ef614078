"""The command that is a worker of the scorer pool."""

from __future__ import annotations

from streamrl.cli.shared import part_command

COMMANDS = (
    part_command(
        "scorer",
        "Compute the reference's logprobs of batches, as one worker of the pool.",
        "streamrl.extensions.scorer.process:main",
        index="Which of the pool's workers this is.",
    ),
)
