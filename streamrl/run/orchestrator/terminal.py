"""What the orchestrator shows on the terminal, and what it keeps away from it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.run.monitoring.display import Display, make_display


def say(line: str) -> None:
    """Print a line on stdout, if anybody is left to read it."""
    with suppress(OSError):
        print(line, flush=True)


@contextmanager
def open_display() -> Iterator[Display]:
    display = make_display()
    try:
        yield display
    finally:
        with suppress(OSError):
            display.close()


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log to a file for as long as the block lasts. On the screen, lines of the log would tear the
    display apart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    before = root.handlers
    handler = logging.FileHandler(path)
    handler.setFormatter(before[0].formatter if before else None)
    root.handlers = list[logging.Handler]([handler])
    try:
        yield
    finally:
        root.handlers = before
        handler.close()


def short_path(path: Path) -> str:
    """The path relative to the working directory, if it is below."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
