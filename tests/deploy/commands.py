"""A command of a container, held against the real command line and against its run file, without
starting it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from streamrl.cli.command import cli
from streamrl.config import run_file
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.scorer.extension import Scorer


def check_command(command: Sequence[str], mounted: Mapping[str, str]) -> None:
    """`mounted`: files by their paths in the container. Raises click's errors, ConfigError,
    AssertionError.
    """
    program, *words = command
    assert program == "streamrl", command
    found: click.Command = cli
    while isinstance(found, click.Group):
        name = words.pop(0)
        found = found.commands[name]
    given: dict[str, Any] = found.make_context(found.name, list(words)).params
    run = run_file.load(mounted[given["run"]])
    match found.name:
        case "env":
            assert (
                given["name"] in run.envs and given["index"] < run.envs[given["name"]].replicas
            ), command
        case "scorer":
            assert given["index"] < run.settings_of(Scorer).replicas, command
        case "gateway":
            assert run.session_envs and given["index"] < run.settings_of(Gateway).replicas, command
        case "assembler":
            assert run.session_envs, command
        case "inference":
            assert given["pool"] in run.inference.sizes, command
        case "apply" | "buffer" | "batcher" | "learner" | "orchestrator" | "evaluator":
            pass
        case other:
            raise AssertionError(f"{other} is not a part")
