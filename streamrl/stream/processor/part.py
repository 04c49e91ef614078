"""What every part has, opened and closed in one way: a writer, a meter, and its readiness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Writer
from streamrl.stream.log.retrying import RetryingWriter

W = TypeVar("W", bound=Writer | RetryingWriter | None)


@dataclass(frozen=True)
class OpenPart(Generic[W]):
    """A part while it runs."""

    log: Log
    name: str
    writer: W
    meter: Meter

    def mark_ready(self, is_ready: bool = True) -> None:
        """Report that the part can do its work from now on, or no longer."""
        self.log.mark_ready(is_ready)


@contextmanager
def open_part(log: Log, name: str, writer: W) -> Iterator[OpenPart[W]]:
    """Be the part `name`, which writes transactions with `writer`, if with any.

    Open the writer before anything is read, also before this context is entered: it fences an
    earlier instance of the part, so only then all that the part has written is decided.
    """
    with ExitStack() as stack:
        if writer is not None:
            stack.callback(writer.close)
        meter = Meter(log, name)
        stack.callback(meter.close)
        yield OpenPart(log, name, writer, meter)
