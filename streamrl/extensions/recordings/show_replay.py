"""Prints the result of `streamrl replay`. Progress goes to stderr."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console

from streamrl.batcher.state import BatcherState
from streamrl.config.run_file import RunFile
from streamrl.extensions.assembler.state import AssemblerState
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.progress import progress_bar
from streamrl.extensions.recordings.replay import ReplayResult, replay
from streamrl.run.monitoring.cells import quoted
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.definition import ProcessorState
from streamrl.system.errors import ConfigError


def show_replay(
    run: RunFile, log: Log, only: str | None, step: int | None, console: Console
) -> int:
    """Replay the journals and print whether everything came out the same.

    `only` names one part. With `step`, the buffer and the batcher are replayed up to that training
    step, and the parts' states are printed. An assembler knows no steps and is replayed to its end.
    Returns the exit code, which is 1 if there is a difference.
    """
    processors = processors_of(run)
    if only is not None and only not in processors:
        raise ConfigError(
            f"--part {only}: there is no such part; {' and '.join(processors)} have journals"
        )
    identical: Counter[str] = Counter()

    def is_reached(current: ProcessorState[Any, Any]) -> bool:
        if step is None or isinstance(current.state, AssemblerState):
            return False
        if isinstance(current.state, BatcherState):
            return current.state.next_batch > step
        return current.state.version >= step

    for name in [only] if only else list(processors):
        with progress_bar(f"replay {name}", Console(stderr=True)) as progress:
            result, current = replay(log, processors[name], is_reached, progress)
        identical.update(result.identical)
        _print_replay(name, result, console)
        if result.difference:
            return 1
        if step is not None:
            at = f"step {step}" if is_reached(current) else "its end"
            console.print(f"[bold]{name} at {at}[/]")
            console.print(current.state)
    console.print(
        f"{identical['groups']:,} groups, {identical['batches']:,} batches identical",
        highlight=False,
    )
    return 0


def _print_replay(name: str, result: ReplayResult, console: Console) -> None:
    line = f"{name}: {result.entries:,} journal entries, {result.events:,} records"
    if result.begins_at:
        line += f" from entry {result.begins_at:,} on, as retention has deleted what came before"
    console.print(line, highlight=False)
    if result.strays:
        console.print(
            f"{result.strays:,} records among its outputs were not written by {name}",
            highlight=False,
        )
    if result.difference:
        console.print(quoted("first difference", "bold red") + quoted(f" {result.difference}"))
