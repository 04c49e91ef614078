"""Reads a run's topics into the dashboard's state: first what is there, then what comes. The
dashboard asks no part of the run for anything, and writes nothing.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import kind_of
from streamrl.extensions.dashboard.index import RolloutLocation
from streamrl.extensions.dashboard.state import DATA, VERSIONS, State, fold, on_version
from streamrl.run.orchestrator import run_directory
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log, Message, TopicPartition, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import Batch, Rollout
from streamrl.system.errors import InputGone, StreamrlError, TopicMissing

AT_ONCE = 500  # The lock is held for at most this many messages.
POLL_S = 0.2
TOPICS_LIMIT_S = 60.0  # A run that is starting may take this long to create its topics.


class LiveState:
    """The state, which one thread folds and others read under `lock`, and how far the log has been
    read.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.lock = threading.Lock()
        self.log: Log | None = None  # None while the log cannot be read
        # Of the offsets that were there at the start: how many have been read, and how many there
        # are.
        self.done = 0
        self.total = 1
        # The offsets to read on from. They are empty before anything has been read.
        self.positions: dict[TopicPartition, int] = {}
        self.caught_up = threading.Event()

    @property
    def read_share(self) -> float:
        """The share of the log that has been read. It is 1 only once all of it has been."""
        if self.caught_up.is_set():
            return 1.0
        return min(self.done / max(self.total, 1), 0.99)

    def fold(self, messages: list[Message]) -> None:
        """Fold the messages in while holding the lock."""
        with self.lock:
            for message in messages:
                fold(self.state, message)
        self.done += len(messages)


@contextmanager
def log_of(run: RunFile, stop: threading.Event) -> Iterator[Log | None]:
    """The run's log, or None if `stop` is set before it can be read.

    If the run has a local broker, and neither the broker nor the run is running, then the
    broker is started for as long as the context lasts.
    """
    while broker_down(run) and run_directory.in_use(run):
        # The run is starting, or its supervisor is starting its broker again.
        if stop.wait(POLL_S):
            yield None
            return
    with connect.connect_or_start(run) as settings:
        yield KafkaLog(settings, run.run)


def broker_down(run: RunFile) -> bool:
    """Whether the run has a local broker that does not run. An external cluster never counts
    as down.
    """
    if connect.cluster_settings(run).get("bootstrap.servers"):
        return False
    return broker.find(connect.broker_dir(run)) is None


def follow(
    live: LiveState, log: Log, stop: threading.Event, gone: Callable[[], bool] = lambda: False
) -> None:
    """Read all messages, and then new ones, until `stop` is set or the log is `gone`. If the log
    has been read before, this continues from there.
    """
    live.log = log
    if not live.positions:
        live.positions = catch_up(live, log, stop)
        live.caught_up.set()
    reader = log.reader(live.positions)
    try:
        while not stop.is_set():
            polled_s = time.monotonic()
            messages = reader.poll(AT_ONCE, POLL_S)
            if messages:
                live.fold(sorted(messages, key=by_time))
                for message in messages:
                    live.positions[message.topic, message.partition] = message.offset + 1
            elif gone():
                return
            else:
                # The reader of an export does not wait, so the rest of POLL_S is waited for here.
                stop.wait(max(0.0, polled_s + POLL_S - time.monotonic()))
    finally:
        live.log = None
        reader.close()


def by_time(message: Message) -> tuple[float, bool]:
    """The sort key by time. It puts a policy version before other messages of the same millisecond,
    because they belong to the step that the version begins.
    """
    return message.timestamp_s, message.topic != VERSIONS


def catch_up(live: LiveState, log: Log, stop: threading.Event) -> dict[TopicPartition, int]:
    """Fold all messages that are there. Returns the offsets to read on from.

    Policy versions are read first, because they tell to which step everything else belongs. The
    large topics follow, partition by partition. The small topics come last, merged by time, so that
    the loop is seen as it was at each step.
    """
    state = live.state
    counts = _topics(state.run, log, stop)
    books = partitions_in(state.books, counts)
    data = partitions_in([topic for topic in sorted(counts) if kind_of(topic) in DATA], counts)
    # The ends of the data are looked up last, so every record that a fate names is below them.
    ends = {where: end_offset(log, *where) for where in (*books, *data)}
    starts = log.beginning_offsets(ends)
    live.total = sum(end - starts[where] for where, end in ends.items())

    def messages_of(where: TopicPartition) -> Iterator[Message]:
        return read(log, *where, starts[where], ends[where])

    with live.lock:
        state.starts |= {where: starts[where] for where in data}
    for where in books:
        if where[0] == VERSIONS:
            for piece in pieces(messages_of(where)):
                with live.lock:
                    for message in piece:
                        on_version(state, message)
    done = 0
    for where in data:
        for piece in pieces(messages_of(where)):
            if stop.is_set():
                return ends
            live.fold(piece)
            live.done = done + piece[-1].offset + 1 - starts[where]
        done += ends[where] - starts[where]
        live.done = done
    merged = heapq.merge(*(messages_of(where) for where in books), key=by_time)
    for piece in pieces(merged):
        if stop.is_set():
            break
        live.fold(piece)
    return ends


def partitions_in(topics: Iterable[str], counts: Mapping[str, int]) -> list[TopicPartition]:
    """All partitions of these topics. `counts`: by topic, the number of its partitions."""
    return [(topic, number) for topic in topics for number in range(counts.get(topic, 0))]


def _topics(run: RunFile, log: Log, stop: threading.Event) -> dict[str, int]:
    """The number of partitions of each topic, once the run has the topics that every run has.

    Raises TopicMissing if the run does not have them within TOPICS_LIMIT_S or before `stop`.
    """
    deadline_s = time.monotonic() + TOPICS_LIMIT_S
    needed = {VERSIONS, topology.FATES, topology.METRICS}
    needed |= {topology.rollouts(env) for env in run.envs}
    while True:
        counts = log.topics()
        missing = needed - counts.keys()
        if not missing:
            return counts
        if time.monotonic() > deadline_s or stop.wait(POLL_S):
            raise TopicMissing(
                f"run {run.run!r} has no topic {min(missing)}; create its topics with `streamrl"
                " topics apply RUN.yaml`"
            )


def pieces(messages: Iterator[Message]) -> Iterator[list[Message]]:
    """The messages in lists of at most AT_ONCE."""
    while piece := list(islice(messages, AT_ONCE)):
        yield piece


# ---- single records, on request ------------------------------------------------------------------


def rollout_at(log: Log, place: RolloutLocation) -> Rollout | str:
    """The rollout at this place, or why it cannot be read."""
    topic = topology.rollouts(place.env)
    try:
        message = next(read(log, topic, place.partition, place.offset, place.offset + 1), None)
    except InputGone:
        message = None
    if message is None:
        return "its tokens are gone: retention has removed the record"
    record = to_event(message, ("rollout",)).record
    if isinstance(record, Rollout):
        return record
    return f"the record cannot be read: {getattr(record, 'cause', 'it is empty')}"


def batch_at(log: Log, offset: int) -> Batch | None:
    """The batch at this offset of `batches`, or None if it cannot be read any more."""
    batches = topology.sole_partition(topology.BATCHES)
    try:
        message = next(read(log, *batches, offset, offset + 1), None)
    except StreamrlError:
        return None
    if message is None:
        return None
    record = to_event(message, ("batch",)).record
    return record if isinstance(record, Batch) else None
