"""What a processor is: its inputs, its configuration and its step function; and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import msgspec

from streamrl.config import topology
from streamrl.config.plugins import imports_in
from streamrl.config.run_file import RunFile
from streamrl.stream.log.protocol import (
    Event,
    Log,
    Message,
    Offsets,
    Output,
    TopicPartition,
    partitions_of,
)
from streamrl.stream.processor.awake_clock import AwakeClock
from streamrl.stream.processor.join import Join
from streamrl.system.errors import StreamrlError

S = TypeVar("S")
C = TypeVar("C")
Commit = Callable[[Sequence[Message]], int]  # returns the offset of the last message

# A restart processes at most so many events again, and reads the records that the state holds.
# More where the state is large: see SNAPSHOT_EVENT_BYTES.
SNAPSHOT_EVENTS = 5_000
# Journals are kept for ever, so snapshots take at most so many bytes of one for each event.
SNAPSHOT_EVENT_BYTES = 100
SNAPSHOT_S = 21 * 3600.0  # an eighth of a retention of seven days


class ProcessorReport(NamedTuple):
    """What a processor reports once a second: gauges, and warnings for its log."""

    values: dict[str, float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Processor(Generic[C, S]):
    """A part as the loop sees it. `step`, `paused`, `due`, `report` and `reconcile` are pure: they
    use no clock, no randomness and no files.
    """

    name: str  # its identity: one process at a time has it
    inputs: Mapping[str, tuple[str, ...]]  # topic -> the schemas that it may carry
    config: C  # frozen, of plain values: it goes into the journal as JSON
    initial: Callable[[], S]
    # (config, state, events, time_s) -> (state, outputs). It takes every event, and may change the
    # state that it is given.
    step: Callable[[C, S, Iterable[Event], float], tuple[S, list[Output]]]
    # (config, state) -> the topics that are not read for now
    paused: Callable[[C, S], frozenset[str]] = lambda config, state: frozenset()
    # (config, state, time_s) -> a report, which is never part of the outputs
    report: Callable[[C, S, float], ProcessorReport] = lambda config, state, time_s: (
        ProcessorReport({})
    )
    # (config, state, removed, time_s) -> (state, outputs). It is called at a start if the
    # configuration has changed, or if retention has deleted what the processor needs: nothing is
    # left below the offsets of `removed`. It lets go, by fates, of what the state holds from below
    # them, and from topics that are no input any more.
    reconcile: Callable[[C, S, Offsets, float], tuple[S, list[Output]]] = (
        lambda config, state, removed, time_s: (state, [])
    )
    # (config, state, time_s) -> whether a step without events is to be made now; asked once a
    # second
    due: Callable[[C, S, float], bool] = lambda config, state, time_s: False
    # state -> its clock, where the part has limits on waiting (`awake_clock.py`)
    clock: Callable[[S], AwakeClock | None] = lambda state: None
    snapshot_events: int = SNAPSHOT_EVENTS
    snapshot_s: float = SNAPSHOT_S
    # Whether the processor continues without what retention has deleted. Otherwise it ends with
    # InputGone at its start.
    expires_removed: bool = False
    # How inputs that refer to other records are joined with these, if any do.
    join: Join | None = None
    # The MODULE:NAME that a configuration in its journal may have: those of the user's run file.
    imports: frozenset[str] = frozenset()
    # (topic, partition) -> whether it reads this partition of an input; a shard reads some.
    takes: Callable[[str, int], bool] = lambda topic, partition: True
    # The share of invalid records above which a topic is paused for a while
    # (`circuit_breaker.py`).
    max_invalid_frac: float = 1.0

    @property
    def journal(self) -> str:
        """The topic of its journal."""
        return topology.journal(self.name)

    def partitions(self, log: Log) -> list[TopicPartition]:
        """The partitions that it reads. Raises TopicMissing."""
        return [tp for tp in partitions_of(log, self.inputs) if self.takes(*tp)]

    def existing_partitions(self, log: Log) -> list[TopicPartition]:
        """The partitions that it reads, of the inputs that exist: those of an env that was put into
        the run file may not have been made yet.
        """
        existing = log.topics()
        topics = [topic for topic in self.inputs if topic in existing]
        return [tp for tp in partitions_of(log, topics) if self.takes(*tp)]

    def schemas_of(self, topic: str) -> tuple[str, ...]:
        """The schemas that a topic may carry, also if it is no input any more: an env that has been
        taken out of the run has rollouts like the other envs.
        """
        if topic in self.inputs:
            return self.inputs[topic]
        kinds = {topology.kind_of(name): schemas for name, schemas in self.inputs.items()}
        return kinds[topology.kind_of(topic)]


class RunSettings(TypedDict):
    """The arguments of a `Processor` that a run file sets alike for every processor."""

    snapshot_s: float
    expires_removed: bool
    imports: frozenset[str]


def run_settings(run: RunFile) -> RunSettings:
    return RunSettings(
        snapshot_s=run.topics.snapshot_s,
        expires_removed=run.topics.on_removed == "expire",
        imports=run.imported,
    )


@dataclass
class ProcessorState(Generic[C, S]):
    """The progress of a processor after entry `sequence` of its journal."""

    state: S
    config: C | None = None  # the one last recorded
    sequence: int = -1
    offsets: dict[TopicPartition, int] = field(default_factory=dict[Any, Any])  # next, by input
    snapshot_offset: int = -1  # of the last snapshot, in the journal
    snapshot_bytes: int = 0  # of the last snapshot
    events_since_snapshot: int = 0
    unsaved_since_s: float | None = None  # the time of the first entry that is in no snapshot
    # Made by the last entry that was replayed.
    metrics: list[Message] = field(default_factory=list[Message])

    def add_entry(self, time_s: float) -> None:
        """Count one more entry, made at `time_s`, that is in no snapshot yet."""
        self.sequence += 1
        if self.unsaved_since_s is None:
            self.unsaved_since_s = time_s

    def set_snapshot(self, offset: int, state_bytes: int) -> None:
        """Note that a snapshot of the current state is at this offset of the journal."""
        self.snapshot_offset = offset
        self.snapshot_bytes = state_bytes
        self.events_since_snapshot = 0
        self.unsaved_since_s = None

    def advance(self, positions: Offsets) -> None:
        """Note how far a reader is. That is after the last record taken, and after what no reader
        sees: transaction markers and aborted records, which retention deletes like any other.
        """
        for tp, position in positions.items():
            self.offsets[tp] = max(self.offsets.get(tp, 0), position)

    def skip_removed(self, removed: Offsets) -> None:
        """Do not read any more what retention has deleted: all that is below these offsets."""
        for tp, offset in removed.items():
            if tp in self.offsets:
                self.offsets[tp] = max(self.offsets[tp], offset)


def to_json(config: Any) -> str:
    return msgspec.json.encode(config).decode()


def from_json(text: str, processor: Processor[C, S]) -> C:
    """The configuration that a journal has recorded. Raises StreamrlError if it names code that the
    user's run file does not name.
    """
    for name in imports_in(msgspec.json.decode(text)):
        if name not in processor.imports:
            raise StreamrlError(
                f"{processor.journal} names {name!r}, the run file does not, and nothing is "
                "imported because a log names it; is it yours? Add it to `imports` there"
            )
    return msgspec.json.decode(text, type=type(processor.config))
