"""Bring a restored state in line with today's configuration and with what retention has left."""

from __future__ import annotations

from typing import Any, TypeVar

from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Offsets, TopicPartition
from streamrl.stream.processor.definition import Commit, Processor, ProcessorState
from streamrl.stream.processor.retention import NOTHING_LEFT, first_offsets, is_gone, listed
from streamrl.stream.processor.snapshots import held_events
from streamrl.stream.processor.transaction import write_entry
from streamrl.system.errors import InputGone

S = TypeVar("S")
C = TypeVar("C")


def reconcile(
    log: Log,
    processor: Processor[C, S],
    current: ProcessorState[C, S],
    begin: Offsets,
    time_s: float,
    commit: Commit,
) -> list[str]:
    """Call `Processor.reconcile` if there is anything to bring in line, and commit what it gives in
    a separate entry.

    `begin`: the first offsets of the inputs. Returns warnings. Raises InputGone if something is
    gone and the processor is not to continue without it.
    """
    if current.sequence < 0:
        return []
    removed = removed_offsets(log, current, begin)
    if not removed and current.config == processor.config:
        return []
    warnings: list[str] = []
    gone = sorted(
        f"{topic}[{partition}] below offset {offset}"
        for (topic, partition), offset in removed.items()
        if topic in processor.inputs
    )
    if gone:
        what = (
            "retention has deleted records that it holds or has not read, or their topic was "
            f"deleted and made again: {listed(gone)}"
        )
        if not processor.expires_removed:
            raise InputGone(
                f"{processor.name}: {what}; to continue without them:"
                " --set topics.on_removed=expire"
            )
        warnings.append(f"{what}; it continues without them (topics.on_removed: expire)")
    current.state, outputs = processor.reconcile(processor.config, current.state, removed, time_s)
    current.skip_removed(removed)
    write_entry(
        processor,
        current,
        time_s,
        slices=[],
        outputs=[to_message(output) for output in outputs],
        commit=commit,
        removed=removed,
    )
    return warnings


def removed_offsets(
    log: Log, current: ProcessorState[Any, Any], begin: Offsets
) -> dict[TopicPartition, int]:
    """The offset before which nothing is left, of each partition of which retention has deleted
    records that the processor holds or has not read.

    A partition that ends before the processor's offset belongs to a topic that was deleted and made
    again. Nothing is left of what the processor had read of it.
    """
    end = log.end_offsets(begin)
    removed: dict[TopicPartition, int] = {}
    for tp, first in begin.items():
        offset = current.offsets.get(tp, first)
        if is_gone(offset, first):
            removed[tp] = first
        elif end[tp] < offset < NOTHING_LEFT:
            removed[tp] = offset
    held: dict[TopicPartition, int] = {}
    for event in held_events(current.state):
        if event.record is None:
            tp = event.topic, event.partition
            held[tp] = max(held.get(tp, 0), event.offset + 1)
    for tp, first in first_offsets(log, held).items():
        removed[tp] = max(removed.get(tp, 0), first, held[tp])
    return removed
