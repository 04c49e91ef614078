"""Shows the progress of a long command and the time left: as a bar on a terminal, elsewhere as a
line every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

EVERY_S = 5.0

OnProgress = Callable[[int, int], None]  # (done, total)


def no_progress(done: int, total: int) -> None:
    """Show nothing, for callers without a terminal."""


@contextmanager
def progress_bar(what: str, console: Console) -> Iterator[OnProgress]:
    """Show the progress of `what` while the block lasts. Yields the function that reports it."""
    if not console.is_terminal:
        yield PlainProgress(
            what,
            lambda line: console.print(line, highlight=False, soft_wrap=True),
            time.monotonic(),
        )
        return
    with Progress(
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


@dataclass
class PlainProgress:
    """Prints a line of progress every `EVERY_S` seconds."""

    what: str
    say: Callable[[str], None]
    started_s: float  # by `clock`
    clock: Callable[[], float] = time.monotonic
    printed_s: float | None = None  # when the last line was printed

    def __call__(self, done: int, total: int) -> None:
        now_s = self.clock()
        last_s = self.started_s if self.printed_s is None else self.printed_s
        if now_s - last_s < EVERY_S or not 0 < done < total:
            return
        self.printed_s = now_s
        left = timedelta(seconds=round((now_s - self.started_s) / done * (total - done)))
        self.say(f"{self.what}: {done:,} of {total:,} ({done / total:.0%}), {left} left")
