"""Replays the journal of a processor, and compares every output with the recorded one, by bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from streamrl.config import topology
from streamrl.extensions.recordings.progress import OnProgress, no_progress
from streamrl.stream.log.codec import DecodeError, decode, digest
from streamrl.stream.log.partitions_reader import PartitionsReader
from streamrl.stream.log.protocol import Log, Message, TopicPartition, end_offset
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.journal import SliceReader, entries
from streamrl.stream.processor.restore import replay_entry, restore_earliest
from streamrl.stream.records import JournalEntry, Record
from streamrl.system.errors import InputGone

C = TypeVar("C")
S = TypeVar("S")
# The kinds of topics whose outputs are compared message by message. Only one part writes to such a
# topic. The outputs to other topics are compared by the digest of their journal entry.
COMPARED = (topology.GROUPS, topology.BATCHES)

ENTRIES_AHEAD = 200
LOOK_AHEAD = 1_000  # the records of other writers that may be between two of a part


@dataclass
class ReplayResult:
    """What a replay has compared, up to the first difference."""

    entries: int = 0
    events: int = 0
    strays: int = 0  # records among the outputs that the part did not write
    begins_at: int = 0  # the first entry; above 0 if retention has deleted inputs of earlier ones
    identical: dict[str, int] = field(default_factory=dict[str, int])  # kind of topic -> outputs
    difference: str = ""  # the first difference, in words


@dataclass
class RecordedOutputs:
    """The recorded outputs of a part, in the order in which they were written."""

    log: Log
    from_the_start: bool = True  # False if entries before the first replayed one wrote outputs
    strays: int = 0  # records that were skipped, because no entry of the part's journal wrote them
    _has_all_of: dict[str, bool] = field(default_factory=dict[str, bool])
    _counts: dict[str, int] = field(default_factory=dict[str, int])  # partitions of each topic
    # topic -> for each partition, its unread messages and those that were read ahead
    _ahead: dict[str, list[tuple[Iterator[Message], deque[Message]]]] = field(
        default_factory=dict[Any, Any]
    )

    def __post_init__(self) -> None:
        self._counts = self.log.topics()
        self._reader = PartitionsReader(self.log)

    def close(self) -> None:
        self._reader.close()

    def partitions(self, kind: str) -> list[TopicPartition]:
        """All partitions of the topics of a kind."""
        return [
            (topic, partition)
            for topic, count in self._counts.items()
            if topology.kind_of(topic) == kind
            for partition in range(count)
        ]

    def has_all_of(self, topic: str) -> bool:
        """Whether the topic still has all outputs, from the first entry on.

        Otherwise the outputs can be compared only by the digests of their entries. The broker is
        asked once for all topics of a kind, as its answer takes longer than replaying an entry;
        what it deletes later is noticed by `next`.
        """
        if topic not in self._has_all_of:
            begin = self.log.beginning_offsets(self.partitions(topology.kind_of(topic)))
            begins_at = dict.fromkeys((name for name, _ in begin), 0)
            for (name, _), offset in begin.items():
                begins_at[name] += offset
            for name, offset in begins_at.items():
                self._has_all_of.setdefault(name, self.from_the_start and not offset)
        return self._has_all_of[topic]

    def next(self, message: Message) -> Message | None:
        """The next recorded message with this message's topic and key. None if there is none, or if
        retention has deleted it: the topic does not have all outputs any more.

        A part writes in the order of its journal entries. So messages before it in its partition
        were written by another writer, and are counted as strays.
        """
        try:
            return self._next(message)
        except InputGone:
            self._has_all_of[message.topic] = False
            return None

    def _open(self, kind: str) -> None:
        """Read the topics of a kind from now on."""
        ends = self.log.end_offsets(self.partitions(kind))
        self._reader.read_ahead(self.log.beginning_offsets(list(ends)), ends)
        for tp, end in ends.items():
            unread = self._reader.read(tp, 0, end - 1)
            self._ahead.setdefault(tp[0], []).append((unread, deque()))

    def _next(self, message: Message) -> Message | None:
        if message.topic not in self._ahead:
            self._open(topology.kind_of(message.topic))
        for skipped in range(LOOK_AHEAD):
            for unread, ahead in self._ahead[message.topic]:
                if len(ahead) <= skipped:
                    ahead.extend(islice(unread, 1))
                if len(ahead) > skipped and ahead[skipped].key == message.key:
                    self.strays += skipped
                    for _ in range(skipped):
                        ahead.popleft()
                    return ahead.popleft()
        return None


def replay(
    log: Log,
    processor: Processor[C, S],
    stop_at: Callable[[ProcessorState[C, S]], bool] = lambda current: False,
    progress: OnProgress = no_progress,
) -> tuple[ReplayResult, ProcessorState[C, S]]:
    """Replay the processor's journal from its first entry, and compare its outputs.

    If retention has deleted inputs, the replay begins at the first snapshot whose later inputs are
    all there. It ends at the first difference, or when `stop_at` returns True. Returns the result
    and the state that was reached.
    """
    journal = processor.journal
    end = end_offset(log, *topology.sole_partition(journal))
    current, start, reader = restore_earliest(log, processor)
    result = ReplayResult(begins_at=current.sequence + 1)
    recorded = RecordedOutputs(log, from_the_start=current.sequence < 0)
    for offset, entry in _ahead(entries(log, journal, start), reader):
        progress(offset, end)
        if not isinstance(entry, JournalEntry) or entry.sequence <= current.sequence:
            continue
        outputs = replay_entry(processor, current, entry, reader)
        result.entries += 1
        result.events = reader.records_read
        result.difference = compare(processor.name, entry, outputs, recorded, result.identical)
        if result.difference or stop_at(current):
            break
    reader.close()
    recorded.close()
    result.strays = recorded.strays
    return result, current


def _ahead(
    recorded: Iterator[tuple[int, Record]], reader: SliceReader
) -> Iterator[tuple[int, Record]]:
    """These entries of a journal, the inputs of ENTRIES_AHEAD of which are read at once."""
    while some := list(islice(recorded, ENTRIES_AHEAD)):
        reader.read_ahead(entry for _, entry in some if isinstance(entry, JournalEntry))
        yield from some


def compare(
    name: str,
    entry: JournalEntry,
    outputs: list[Message],
    recorded: RecordedOutputs,
    identical: dict[str, int],
) -> str:
    """The first difference between the outputs of a journal entry and the recorded ones, in a line.
    It is empty if there is none.

    Adds the number of identical outputs to `identical`, by kind of topic.
    """
    for output in outputs:
        kind = topology.kind_of(output.topic)
        if kind not in COMPARED:
            continue
        if recorded.has_all_of(output.topic):
            then = recorded.next(output)
            if then is None and recorded.has_all_of(output.topic):
                key = (output.key or b"").decode()
                return (
                    f"{output.topic}: entry {entry.sequence} of {name} now gives a record with key"
                    f" {key!r} that was not recorded there"
                )
            if then is not None and then.value != output.value:
                place = f"{output.topic}[{then.partition}]@{then.offset}"
                return f"{place}: {first_difference(then, output)}"
        # An output that is not recorded any more is compared by the digest below.
        identical[kind] = identical.get(kind, 0) + 1
    if digest(outputs) != entry.digest:
        return (
            f"entry {entry.sequence} of {name}: its {len(outputs)} outputs do not have the digest"
            f" of the {entry.output_count} recorded"
        )
    return ""


def first_difference(recorded: Message, replayed: Message) -> str:
    """The first place where the records of two messages differ, in words."""
    try:
        then = decode(dict(recorded.headers)["schema"], recorded.value or b"")
        now = decode(dict(replayed.headers)["schema"], replayed.value or b"")
    except (DecodeError, KeyError) as error:
        return f"cannot be read ({error})"
    if type(then) is not type(now):
        return f"recorded a {type(then).__name__}, replayed a {type(now).__name__}"
    return next(differences(then, now, ""), "the same fields in other bytes")


def differences(then: Any, now: Any, path: str) -> Iterator[str]:
    """All places where two values differ, each as `field[index]: recorded x, replayed y`.

    Array elements are compared by their bits. `path` is the place of the values themselves.
    """
    if isinstance(then, Record) and type(then) is type(now):
        for name in then.__struct_fields__:
            inner = f"{path}.{name}" if path else name
            yield from differences(getattr(then, name), getattr(now, name), inner)
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
