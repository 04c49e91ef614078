"""Folds the journal of a part again and compares every output with the recorded one, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from streamrl.config import topology
from streamrl.log.chunks import joined
from streamrl.log.codec import DecodeError, decode, digest
from streamrl.log.protocol import Log, Message, beginning_offset, end_offset, read
from streamrl.processor.definition import Processor, ProcessorState
from streamrl.processor.journal import entries
from streamrl.processor.restore import replay_entry, restore_earliest
from streamrl.recordings.progress import OnProgress, no_progress
from streamrl.records import JournalEntry, Record

C = TypeVar("C")
S = TypeVar("S")
# topics that one part writes and nothing is deleted from: compared message by message, others by
# the entry's digest
COMPARED = (topology.GROUPS, topology.BATCHES)

LOOK_AHEAD = 1_000  # records of somebody else among a part's own


@dataclass
class ReplayResult:
    """The number of identical outputs by kind of topic, and the first difference."""

    entries: int = 0
    events: int = 0
    strays: int = 0  # records among the outputs that the part did not write
    begins_at: int = 0  # the first entry: not 0 where retention has deleted inputs of those before
    identical: dict[str, int] = field(default_factory=dict[str, int])
    difference: str = ""


@dataclass
class RecordedOutputs:
    """The recorded outputs of a part, taken in the order in which they were written."""

    log: Log
    from_the_start: bool = True  # False: the first outputs to be compared have others before them
    strays: int = 0  # records that were passed over: no entry of the part's journal wrote them
    _ahead: dict[str, list[tuple[Iterator[Message], deque[Message]]]] = field(
        default_factory=dict[Any, Any]
    )

    def has_all_of(self, topic: str) -> bool:
        """Are all outputs there that were written to the topic? Otherwise they are compared by the
        digests of their entries only.
        """
        return self.from_the_start and not any(
            beginning_offset(self.log, topic, p) for p in range(self.log.topics()[topic])
        )

    def next(self, message: Message) -> Message | None:
        """The next recorded message of the same topic and key; None when there is none.

        Those before it in its partition were written by somebody else: a part writes in the order
        of its entries.
        """
        if message.topic not in self._ahead:
            partitions = range(self.log.topics()[message.topic])
            self._ahead[message.topic] = [
                (read(self.log, message.topic, p), deque()) for p in partitions
            ]
        for place in range(LOOK_AHEAD):
            for iterator, ahead in self._ahead[message.topic]:
                if len(ahead) <= place:
                    ahead.extend(islice(iterator, 1))
                if len(ahead) > place and ahead[place].key == message.key:
                    self.strays += place
                    for _ in range(place):
                        ahead.popleft()
                    return ahead.popleft()
        return None


def replay(
    log: Log,
    part: Processor[C, S],
    stop_at: Callable[[ProcessorState[C, S]], bool] = lambda fold: False,
    progress: OnProgress = no_progress,
) -> tuple[ReplayResult, ProcessorState[C, S]]:
    """Fold the part's journal from its first entry, or from the first snapshot whose inputs are
    still there, and compare.

    Ends at the first difference, or when `stop_at` says so.
    """
    end = end_offset(log, *topology.sole_partition(topology.journal(part.name)))
    fold, start, tape = restore_earliest(log, part)
    result = ReplayResult(begins_at=fold.sequence + 1)
    recorded = RecordedOutputs(log, from_the_start=fold.sequence < 0)
    for offset, entry in entries(log, topology.journal(part.name), start):
        progress(offset, end)
        if not isinstance(entry, JournalEntry) or entry.sequence <= fold.sequence:
            continue
        outputs = replay_entry(part, fold, entry, tape)
        result.entries = result.entries + 1
        result.events = tape.records_read
        result.difference = compare(part.name, entry, outputs, recorded, result.identical)
        if result.difference or stop_at(fold):
            break
    tape.close()
    result.strays = recorded.strays
    return result, fold


def compare(
    name: str,
    entry: JournalEntry,
    outputs: list[Message],
    recorded: RecordedOutputs,
    identical: dict[str, int],
) -> str:
    """The first difference between an entry's outputs now and then, in a line; empty when there is
    none.
    """
    for output in joined(outputs):  # batches of an earlier run are made in parts
        kind = output.topic.partition(".")[0]
        if kind not in COMPARED:
            continue
        if not recorded.has_all_of(output.topic):
            identical[kind] = identical.get(kind, 0) + 1  # if the digest is the same
            continue
        then = recorded.next(output)
        if then is None:
            key = (output.key or b"").decode()
            return (
                f"{output.topic}: entry {entry.sequence} of {name} now gives a record with key"
                f" {key!r} that was not recorded there"
            )
        if then.value != output.value:
            return (
                f"{output.topic}[{then.partition}]@{then.offset}: {first_difference(then, output)}"
            )
        identical[kind] = identical.get(kind, 0) + 1
    if digest(outputs) != entry.digest:
        return (
            f"entry {entry.sequence} of {name}: its {len(outputs)} outputs do not have the digest"
            f" of the {entry.output_count} recorded"
        )
    return ""


def first_difference(recorded: Message, replayed: Message) -> str:
    """Field and index where two messages of a record differ."""
    try:
        then, now = (
            decode(dict(m.headers)["schema"], m.value or b"") for m in (recorded, replayed)
        )
    except (DecodeError, KeyError) as error:
        return f"cannot be read ({error})"
    if type(then) is not type(now):
        return f"recorded a {type(then).__name__}, replayed a {type(now).__name__}"
    return next(differences(then, now, ""), "the same fields in other bytes")


def differences(then: Any, now: Any, path: str) -> Iterator[str]:
    """Every place where two values differ, as `field[index]: recorded x, replayed y`; floats by
    their bits.
    """
    if isinstance(then, Record) and type(then) is type(now):
        for name in then.__struct_fields__:
            yield from differences(
                getattr(then, name), getattr(now, name), f"{path}.{name}" if path else name
            )
    elif isinstance(then, np.ndarray) and isinstance(now, np.ndarray):
        if (then.dtype, then.shape) != (now.dtype, now.shape):
            yield (
                f"{path}: recorded {then.dtype}{list(then.shape)}, replayed"
                f" {now.dtype}{list(now.shape)}"
            )
        else:
            unequal = then.view(f"u{then.itemsize}") != now.view(f"u{now.itemsize}")
            for index in np.flatnonzero(unequal).tolist():
                yield f"{path}[{index}]: recorded {then[index]}, replayed {now[index]}"
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif then != now:
        yield f"{path}: recorded {then!r}, replayed {now!r}"
