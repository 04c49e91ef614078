"""A log that notes what its part does with it: how far it has read, how long its transactions take,
what it measures. Nothing of that is in any loop: a part is handed this log instead of the plain
one.

From that follow the three answers of `health.py`. It is alive while it uses its log. It is ready
once it has said so (`ready`), the broker answers, and it has read what lay in its inputs at that
time. Its metrics are those it has published, and those of its log, which are published with them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from streamrl.errors import StreamrlError
from streamrl.log.codec import to_event, to_message
from streamrl.log.dead_letters import TOPIC as LETTERS
from streamrl.log.meter import METRICS
from streamrl.log.protocol import (
    Log,
    Message,
    Output,
    PlainWriter,
    Positions,
    Reader,
    TopicPartition,
    Writer,
)
from streamrl.records import Metric

TELL_S = 1.0  # between two records of the log's own numbers
PEAK_S = 30.0  # the longest transaction of the last one to two of these is shown
ANSWER_S = 15.0  # a broker that has not answered for so long is not connected

Clock = Callable[[], float]


class Watched:
    """The log of one part."""

    def __init__(self, log: Log, part: str, clock: Clock = time.monotonic) -> None:
        self.part, self.clock = part, clock
        # path -> what the part shows there beside its own metrics
        self.pages: dict[str, Callable[[], bytes]] = {}
        # source -> its last record that belongs to no step
        self.reports: dict[str, Mapping[str, float]] = {}
        # (source, name) -> the value of the last step that had it
        self.steps: dict[tuple[str, str], float] = {}
        self.is_ready = False
        self.turned_s = self._settled_s = self._began_s = clock()
        self._log, self._readers = log, list[WatchedReader]()
        self._ends: dict[TopicPartition, int] = {}
        self._answered_s: float | None = None
        # where the inputs ended when it became ready; None: not asked since
        self._targets: dict[TopicPartition, int] | None = None
        self._read, self._written, self._letters = Counter[str](), Counter[str](), Counter[str]()
        self._writes, self._transactions, self._transactions_s, self._last_s = False, 0, 0.0, 0.0
        self._peak = Peak()

    # ---- what is asked of it ---------------------------------------------------------------------

    def look(self) -> None:
        """Ask where the inputs end. Blocks as long as the broker does; for a thread beside the
        part.
        """
        where = {at for reader in list(self._readers) for at in reader.where}
        try:
            self._ends = self._log.end_offsets(where)
        except StreamrlError:  # the part itself finds out, and says so
            return
        self._answered_s = self.clock()
        if self.is_ready and self._targets is None:
            self._targets = dict(self._ends)

    @property
    def since_turn_s(self) -> float:
        return self.clock() - self.turned_s

    def unready(self) -> list[str]:
        """What it still lacks, in words; empty when it can do its work."""
        lacks: list[str] = []
        if not self.is_ready:
            lacks.append("its state is not restored yet")
        if self._answered_s is None or self.clock() - self._answered_s > ANSWER_S:
            lacks.append("the broker does not answer")
        if self.is_ready and (behind := self._backlog()) != 0:
            lacks.append(
                "it has not seen how far behind it is"
                if behind is None
                else f"{behind:,} records that lay there at its start are not read"
            )
        return lacks

    def own(self) -> dict[str, float]:
        """What the log has measured, as it stands now."""
        now = self.clock()
        values = {
            "part/ready": float(not self.unready()),
            "part/since_turn_s": now - self.turned_s,
            **{
                f"part/lag_records/{topic}": float(records) for topic, records in self.lag().items()
            },
            **{
                f"part/read_records/{topic}": float(records)
                for topic, records in list(self._read.items())
            },
            **{
                f"part/written_records/{topic}": float(records)
                for topic, records in list(self._written.items())
            },
        }
        if self._writes:
            inputs = dict.fromkeys(
                topic for reader in list(self._readers) for topic, _ in reader.where
            )
            values |= {
                "part/transactions": float(self._transactions),
                "part/transactions_s": self._transactions_s,
            }
            # 0 too: a first one is to be seen as one more
            values |= {
                f"part/dead_letters/{topic}": float(self._letters[topic]) for topic in inputs
            }
            values["part/since_transaction_s"] = now - self._settled_s
        if self._transactions:
            values |= {
                "part/transaction_s": self._last_s,
                "part/transaction_max_s": self._peak.at(now),
            }
        return values

    def lag(self) -> dict[str, int]:
        """Topic -> offsets between what is taken and the end as last seen."""
        found = Counter[str]()
        for reader in list(self._readers):
            for where in reader.where:
                found[where[0]] += max(0, self._ends.get(where, 0) - reader.position(*where))
        return dict(found)

    def _backlog(self) -> int | None:
        """Records of the beginning that are not read, but where the part has chosen not to read on:
        a full window is a working state.
        """
        if self._targets is None:
            return None
        left = 0
        for reader in list(self._readers):
            for where in reader.where:
                if where[0] not in reader.paused:
                    left += max(0, self._targets.get(where, 0) - reader.position(*where))
        if not left:
            self._targets = {}  # from now on lag is load
        return left

    # ---- what it notes ---------------------------------------------------------------------------

    def turned(self) -> None:
        self.turned_s = self.clock()

    def opened(self, reader: WatchedReader) -> None:
        self._readers.append(reader)

    def closed(self, reader: WatchedReader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)

    def took(self, messages: Sequence[Message]) -> None:
        self.turned()
        if messages:
            self._read.update([message.topic for message in messages])

    def settled(self, messages: Sequence[Message], seconds: float) -> None:
        self.turned()
        self._settled_s, self._last_s = self.turned_s, seconds
        self._transactions, self._transactions_s = (
            self._transactions + 1,
            self._transactions_s + seconds,
        )
        self._peak.add(seconds, self.turned_s)
        counts = Counter([message.topic for message in messages])
        self._written.update(counts)
        self._letters.update(
            {
                topic.removeprefix(LETTERS): count
                for topic, count in counts.items()
                if topic.startswith(LETTERS)
            }
        )

    def measured(self, metric: Metric) -> None:
        """What the part publishes. A report takes the place of the one before it: what is not in it
        is over.
        """
        self.turned()
        if metric.step is None:
            self.reports[metric.source] = metric.values
        else:
            self.steps |= {(metric.source, name): value for name, value in metric.values.items()}

    # ---- the log ---------------------------------------------------------------------------------

    def topics(self) -> dict[str, int]:
        return self._log.topics()

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return self._log.beginning_offsets(partitions)

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return self._log.end_offsets(partitions)

    def reader(
        self, positions: Positions, whole: bool = True, bounded: bool = False
    ) -> WatchedReader:
        return WatchedReader(self, self._log.reader(positions, whole, bounded), positions)

    def writer(self, identity: str, changelog_topic: str = "") -> WatchedWriter:
        self._writes = True
        return WatchedWriter(self, self._log.writer(identity, changelog_topic))

    def plain_writer(self) -> WatchedPlainWriter:
        return WatchedPlainWriter(self, self._log.plain_writer())

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return self._log.committed_offsets(identity)

    def close(self) -> None:
        self._log.close()


def ready(log: Log, yes: bool = True) -> None:
    """The part whose log this is can do its work from now on, or no longer."""
    if isinstance(log, Watched):
        log.is_ready = yes


def show(log: Log, path: str, page: Callable[[], bytes]) -> None:
    """The part has a page of its own beside its metrics."""
    if isinstance(log, Watched):
        log.pages[path] = page


class Peak:
    """The largest value of the last one to two `PEAK_S`."""

    def __init__(self) -> None:
        self._began_s, self._now, self._before = 0.0, 0.0, 0.0

    def add(self, value: float, time_s: float) -> None:
        self.at(time_s)
        self._now = max(self._now, value)

    def at(self, time_s: float) -> float:
        if (age_s := time_s - self._began_s) >= PEAK_S:
            self._began_s, self._now, self._before = (
                time_s,
                0.0,
                self._now if age_s < 2 * PEAK_S else 0.0,
            )
        return max(self._now, self._before)


class WatchedReader:
    def __init__(self, watched: Watched, reader: Reader, positions: Positions) -> None:
        self.where, self.paused = tuple(positions), frozenset[str]()
        self._watched, self._reader = watched, reader
        watched.opened(self)

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        messages = self._reader.poll(max_messages, timeout_s)
        self._watched.took(messages)
        return messages

    def position(self, topic: str, partition: int) -> int:
        return self._reader.position(topic, partition)

    def pause(self, topics: Collection[str]) -> None:
        self.paused = frozenset(topics)
        self._reader.pause(self.paused)

    def close(self) -> None:
        self._watched.closed(self)
        self._reader.close()


class WatchedWriter:
    def __init__(self, watched: Watched, writer: Writer) -> None:
        self._watched, self._writer = watched, writer

    def commit(self, messages: Sequence[Message]) -> int:
        before = self._watched.clock()
        offset = self._writer.commit(messages)
        self._watched.settled(messages, self._watched.clock() - before)
        return offset

    def commit_offsets(self, positions: Positions, wait: bool = True) -> bool:
        return self._writer.commit_offsets(positions, wait)

    def close(self) -> None:
        self._writer.close()


class WatchedPlainWriter:
    """Behind a record of metrics, at most once in `TELL_S`, goes one of the log's own."""

    def __init__(self, watched: Watched, writer: PlainWriter) -> None:
        self._watched, self._writer = watched, writer
        self._told_s = watched.clock() - TELL_S

    def send(self, message: Message) -> None:
        self._writer.send(message)
        if message.topic != METRICS:
            return
        record = to_event(message, ("metric",)).record
        if not isinstance(record, Metric):
            return
        self._watched.measured(record)
        if (now := self._watched.clock()) - self._told_s >= TELL_S:
            self._told_s = now
            own = Metric(
                source=self._watched.part, time_s=record.time_s, values=self._watched.own()
            )
            self._writer.send(to_message(Output(METRICS, self._watched.part, own)))

    def flush(self, timeout_s: float = 5.0) -> None:
        self._writer.flush(timeout_s)

    def close(self) -> None:
        self._writer.close()


def _check(log: Watched) -> Log:  # pyright: ignore[reportUnusedFunction]
    return log  # the type checker holds Watched to the protocol here
