"""A log that measures what its part does with it: how far the part has read, how long its
transactions take, what it publishes. A part is handed this log instead of the plain one, so no loop
contains any of it.

The answers of `run/monitoring/pages.py` follow from it. A part is alive while it uses its log. It
is ready once it has called `mark_ready`, the broker answers, and the part has read what was in
its inputs at that time. It has made progress once it has committed a transaction after it was
ready. Its metrics are those that it publishes and those of its log, which are published with them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.dead_letters import TOPIC_PREFIX as DEAD_LETTERS
from streamrl.stream.log.meter import METRICS
from streamrl.stream.log.protocol import (
    Log,
    Message,
    NonTransactionalProducer,
    Offsets,
    OnWritten,
    Output,
    Reader,
    TopicPartition,
    Writer,
)
from streamrl.stream.records import Metric
from streamrl.system.errors import StreamrlError

PUBLISH_INTERVAL_S = 1.0  # between two records of the log's own metrics
PEAK_S = 30.0  # the longest transaction of the last one to two of these periods is shown
# A part without transactions has made progress when it has been ready for so long, after which
# Kubernetes begins its back-off anew.
STABLE_S = 600.0
ANSWER_S = 15.0  # a broker that has not answered for so long counts as disconnected

Clock = Callable[[], float]


class InstrumentedLog(Log):
    """The log of one part."""

    def __init__(self, log: Log, part: str, clock: Clock = time.monotonic) -> None:
        self.part = part
        self.clock = clock
        # path -> what the part shows there besides its own metrics
        self.pages: dict[str, Callable[[], bytes]] = {}
        # source -> its last record that belongs to no step
        self.reports: dict[str, Mapping[str, float]] = {}
        # (source, name) -> the value of the last step that had it
        self.steps: dict[tuple[str, str], float] = {}
        self.is_ready = False

        self._log = log
        self._ready_s: float | None = None  # when the part was ready first
        self._has_worked = False  # whether it has committed a transaction since
        self._readers: list[InstrumentedReader] = []
        self._end_offsets: dict[TopicPartition, int] = {}
        # where the inputs ended when the part became ready; None until that is known
        self._targets: dict[TopicPartition, int] | None = None

        self._active_s = clock()
        self._committed_s = self._active_s
        self._answered_s: float | None = None

        self._read_records = Counter[str]()
        self._written_records = Counter[str]()
        self._dead_letters = Counter[str]()
        self._has_writer = False
        self._transactions = 0
        self._transactions_s = 0.0
        self._last_transaction_s = 0.0
        self._peak = WindowedMax(PEAK_S)

    def mark_ready(self, is_ready: bool = True) -> None:
        self.is_ready = is_ready
        if is_ready and self._ready_s is None:
            self._ready_s = self.clock()

    def register_metrics_page(self, path: str, page: Callable[[], bytes]) -> None:
        self.pages[path] = page

    def refresh_end_offsets(self) -> None:
        """Ask where the inputs end. This blocks as long as the broker does, so it is for a thread
        next to the part's.
        """
        partitions = {tp for reader in list(self._readers) for tp in reader.partitions}
        try:
            self._end_offsets = self._log.end_offsets(partitions)
        except StreamrlError:  # the part itself finds out, and reports it
            return
        self._answered_s = self.clock()
        if self.is_ready and self._targets is None:
            self._targets = dict(self._end_offsets)

    @property
    def since_activity_s(self) -> float:
        return self.clock() - self._active_s

    @property
    def has_progressed(self) -> bool:
        """Whether the part has committed a transaction since it was ready first. A part without
        transactions has progressed after STABLE_S.
        """
        if self._has_writer:
            return self._has_worked
        return self._ready_s is not None and self.clock() - self._ready_s >= STABLE_S

    def readiness_problems(self) -> list[str]:
        """What the part still lacks, in words. Empty when it can do its work."""
        problems: list[str] = []
        if not self.is_ready:
            problems.append("its state is not restored yet")
        if self._answered_s is None or self.clock() - self._answered_s > ANSWER_S:
            problems.append("the broker does not answer")
        if self.is_ready:
            backlog = self._backlog()
            if backlog is None:
                problems.append("it does not know its lag yet")
            elif backlog:
                problems.append(f"{backlog:,} records that were there at its start are not read")
        return problems

    def metrics(self) -> dict[str, float]:
        """What the log has measured up to now."""
        now = self.clock()
        values = {
            "part/ready": float(not self.readiness_problems()),
            "part/since_activity_s": now - self._active_s,
        }
        for topic, records in self.lag().items():
            values[f"part/lag_records/{topic}"] = float(records)
        for topic, records in list(self._read_records.items()):
            values[f"part/read_records/{topic}"] = float(records)
        for topic, records in list(self._written_records.items()):
            values[f"part/written_records/{topic}"] = float(records)
        if self._has_writer:
            values["part/transactions"] = float(self._transactions)
            values["part/transactions_s"] = self._transactions_s
            for reader in list(self._readers):
                for topic, _ in reader.partitions:
                    # Zeros are shown too, so that the first dead letter is seen as an increase.
                    values[f"part/dead_letters/{topic}"] = float(self._dead_letters[topic])
            values["part/since_transaction_s"] = now - self._committed_s
        if self._transactions:
            values["part/transaction_s"] = self._last_transaction_s
            values["part/transaction_max_s"] = self._peak.value(now)
        return values

    def lag(self) -> dict[str, int]:
        """Records of each topic between the part's offsets and the end offsets as last seen."""
        lags = Counter[str]()
        for reader in list(self._readers):
            for tp in reader.partitions:
                lags[tp[0]] += max(0, self._end_offsets.get(tp, 0) - reader.position(*tp))
        return dict(lags)

    def _backlog(self) -> int | None:
        """Number of records that were in the inputs when the part became ready and have not been
        read. None while their number is not known.

        Topics that the part has paused do not count: a full window is a working state.
        """
        if self._targets is None:
            return None
        backlog = 0
        for reader in list(self._readers):
            for tp in reader.partitions:
                if tp[0] not in reader.paused:
                    backlog += max(0, self._targets.get(tp, 0) - reader.position(*tp))
        if not backlog:
            self._targets = {}  # from now on lag is load
        return backlog

    def on_activity(self) -> None:
        self._active_s = self.clock()

    def on_reader_open(self, reader: InstrumentedReader) -> None:
        self._readers.append(reader)

    def on_reader_close(self, reader: InstrumentedReader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)

    def on_poll(self, messages: Sequence[Message]) -> None:
        self.on_activity()
        if messages:
            self._read_records.update([message.topic for message in messages])

    def on_commit(self, messages: Sequence[Message], seconds: float) -> None:
        self.on_activity()
        self._committed_s = self._active_s
        self._has_worked = self._has_worked or self._ready_s is not None
        self._last_transaction_s = seconds
        self._transactions += 1
        self._transactions_s += seconds
        self._peak.add(seconds, self._active_s)
        counts = Counter([message.topic for message in messages])
        self._written_records.update(counts)
        for topic, count in counts.items():
            if topic.startswith(DEAD_LETTERS):
                self._dead_letters[topic.removeprefix(DEAD_LETTERS)] += count

    def on_metric(self, metric: Metric) -> None:
        """Keep what the part publishes. A report replaces the report before it: a name that is
        missing from the new one is no longer current.
        """
        self.on_activity()
        if metric.step is None:
            self.reports[metric.source] = metric.values
            return
        for name, value in metric.values.items():
            self.steps[metric.source, name] = value

    def topics(self) -> dict[str, int]:
        return self._log.topics()

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return self._log.beginning_offsets(partitions)

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return self._log.end_offsets(partitions)

    def reader(
        self, offsets: Offsets, whole: bool = True, bounded: bool = False
    ) -> InstrumentedReader:
        return InstrumentedReader(self, self._log.reader(offsets, whole, bounded), offsets)

    def writer(self, identity: str, changelog_topic: str = "") -> InstrumentedWriter:
        self._has_writer = True
        return InstrumentedWriter(self, self._log.writer(identity, changelog_topic))

    def producer(self, durable: bool = False) -> InstrumentedProducer:
        return InstrumentedProducer(self, self._log.producer(durable))

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return self._log.committed_offsets(identity)

    def close(self) -> None:
        self._log.close()


class WindowedMax:
    """The largest value of the last one to two windows."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began_s = 0.0
        self._current = 0.0
        self._previous = 0.0

    def add(self, value: float, time_s: float) -> None:
        self._advance(time_s)
        self._current = max(self._current, value)

    def value(self, time_s: float) -> float:
        self._advance(time_s)
        return max(self._current, self._previous)

    def _advance(self, time_s: float) -> None:
        age_s = time_s - self._began_s
        if age_s < self._window_s:
            return
        self._previous = self._current if age_s < 2 * self._window_s else 0.0
        self._current = 0.0
        self._began_s = time_s


class InstrumentedReader:
    def __init__(self, log: InstrumentedLog, reader: Reader, offsets: Offsets) -> None:
        self.partitions = tuple(offsets)
        self.paused = frozenset[str]()
        self._log = log
        self._reader = reader
        log.on_reader_open(self)

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        messages = self._reader.poll(max_messages, timeout_s)
        self._log.on_poll(messages)
        return messages

    def position(self, topic: str, partition: int) -> int:
        return self._reader.position(topic, partition)

    def set_paused(self, topics: Collection[str]) -> None:
        self.paused = frozenset(topics)
        self._reader.set_paused(self.paused)

    def seek(self, offsets: Offsets) -> None:
        self.partitions = tuple(offsets)
        self._reader.seek(offsets)

    def close(self) -> None:
        self._log.on_reader_close(self)
        self._reader.close()


class InstrumentedWriter:
    def __init__(self, log: InstrumentedLog, writer: Writer) -> None:
        self._log = log
        self._writer = writer

    def commit(self, messages: Sequence[Message]) -> int:
        before_s = self._log.clock()
        offset = self._writer.commit(messages)
        self._log.on_commit(messages, self._log.clock() - before_s)
        return offset

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        return self._writer.commit_offsets(offsets, wait)

    def close(self) -> None:
        self._writer.close()


class InstrumentedProducer:
    """Sends the log's own metrics after those of the part, at most once in PUBLISH_INTERVAL_S."""

    def __init__(self, log: InstrumentedLog, producer: NonTransactionalProducer) -> None:
        self._log = log
        self._producer = producer
        self._published_s = log.clock() - PUBLISH_INTERVAL_S

    def send(self, message: Message, on_written: OnWritten | None = None) -> None:
        self._producer.send(message, on_written)
        if message.topic != METRICS:
            return
        record = to_event(message, ("metric",)).record
        if not isinstance(record, Metric):
            return
        self._log.on_metric(record)
        now = self._log.clock()
        if now - self._published_s < PUBLISH_INTERVAL_S:
            return
        self._published_s = now
        part = self._log.part
        metric = Metric(source=part, time_s=record.time_s, values=self._log.metrics())
        self._producer.send(to_message(Output(METRICS, part, metric)))

    def flush(self, timeout_s: float = 30.0) -> None:
        self._producer.flush(timeout_s)

    def close(self) -> None:
        self._producer.close()
