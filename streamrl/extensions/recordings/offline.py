"""Writes to the log of a run that is not running: what a fork begins with, and what its processors
would have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from streamrl.extensions.recordings.parent_schedule import Step
from streamrl.stream.log.protocol import Log, Offsets, Writer
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.joiner import joiner_of
from streamrl.stream.processor.transaction import process_batch

FORK = "fork"  # the identity under which a fork's first records are written


@contextmanager
def open_writer(log: Log, identity: str) -> Iterator[Writer]:
    """A writer for the block. After the block every reader sees what it has committed."""
    with closing(log.writer(identity)) as writer:
        yield writer
    # A transaction may still be completed when its commit returns. The next writer waits for that.
    log.writer(identity).close()


def run_steps(
    log: Log, processor: Processor[Any, Any], steps: Iterable[Step], offsets: Offsets
) -> None:
    """Make these steps of a processor, as its first transactions. One without messages is made too,
    because time is part of a state.

    `offsets` has the partitions that the processor does not begin to read at their start.
    """
    current = ProcessorState(processor.initial(), offsets=dict(offsets))
    joiner = joiner_of(log, processor)
    with ExitStack() as stack:
        writer = stack.enter_context(open_writer(log, processor.name))
        producer = stack.enter_context(closing(log.producer()))
        if joiner is not None:
            stack.callback(joiner.close)
        for step in steps:
            batch = process_batch(
                processor,
                current,
                joiner.join(step.messages) if joiner is not None else step.messages,
                step.time_s,
                writer.commit,
                is_behind=step.is_behind,
            )
            for metric in batch.metrics:
                producer.send(metric)
        producer.flush()
