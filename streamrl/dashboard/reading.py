"""A run's topics into the fold: first what is there, then what comes. Everything is only read, and
no part is asked.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.dashboard.index import RolloutLocation
from streamrl.dashboard.state import DATA, VERSIONS, State, fold, hear
from streamrl.errors import InputGone, StreamrlError, TopicMissing
from streamrl.local_kafka import broker, connect
from streamrl.log.codec import to_event
from streamrl.log.kafka import KafkaLog
from streamrl.log.protocol import Log, Message, TopicPartition, end_offset, read
from streamrl.orchestrator import run_directory
from streamrl.records import Batch, Rollout

AT_ONCE = 500  # messages that are folded before somebody else may look
POLL_S = 0.2
TOPICS_LIMIT_S = 60.0  # that a run which is starting may take to have its topics


class LiveState:
    """The state that one thread folds and others read under `lock`, and how far it has been read."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.lock = threading.Lock()
        self.log: Log | None = None  # None: it cannot be read now
        # messages of what was there at the start, by offsets
        self.done = 0
        self.total = 1
        # where to read on; empty: nothing has been read yet
        self.positions: dict[TopicPartition, int] = {}
        self.caught_up = threading.Event()

    @property
    def read_share(self) -> float:
        return 1.0 if self.caught_up.is_set() else min(self.done / max(self.total, 1), 0.99)

    def fold(self, messages: list[Message]) -> None:
        with self.lock:
            for message in messages:
                fold(self.state, message)
        self.done += len(messages)


@contextmanager
def log_of(run: RunFile, stop: threading.Event) -> Iterator[Log | None]:
    """The run's log, or None if `stop` is set before it can be read.

    If nobody runs the run and its own broker is stopped, the broker is started for as long as the
    block lasts.
    """
    # The run is starting, or its supervisor starts its broker again.
    while broker_down(run) and run_directory.in_use(run):
        if stop.wait(POLL_S):
            yield None
            return
    with connect.connect_or_start(run) as settings:
        yield KafkaLog(settings, run.run)


def broker_down(run: RunFile) -> bool:
    """Whether the run's own broker is down. An external cluster is not ours to look after."""
    return (
        not connect.cluster_settings(run).get("bootstrap.servers")
        and broker.find(connect.broker_dir(run)) is None
    )


def follow(
    board: LiveState, log: Log, stop: threading.Event, gone: Callable[[], bool] = lambda: False
) -> None:
    """Read all messages, and then new ones, until `stop` is set or the log is gone."""
    board.log = log
    if not board.positions:
        board.positions = catch_up(board, log, stop)
        board.caught_up.set()
    reader = log.reader(board.positions)
    try:
        while not stop.is_set():
            before = time.monotonic()
            messages = reader.poll(AT_ONCE, POLL_S)
            if messages:
                board.fold(sorted(messages, key=by_time))
                board.positions |= {
                    (message.topic, message.partition): message.offset + 1 for message in messages
                }
            elif gone():
                return
            else:
                # an export's reader never waits
                stop.wait(max(0.0, before + POLL_S - time.monotonic()))
    finally:
        board.log = None
        reader.close()


def by_time(message: Message) -> tuple[float, bool]:
    """Sort key that puts a version before other messages of the same millisecond."""
    return message.timestamp_s, message.topic != VERSIONS


def catch_up(board: LiveState, log: Log, stop: threading.Event) -> dict[TopicPartition, int]:
    """Fold all messages that are there. Returns the offsets from which to go on.

    Policy versions are read first, because they say to which step everything else belongs. The
    large topics follow, partition by partition. The small topics come last, merged by time, so that
    the loop is seen as it was at each step.
    """
    state = board.state
    there = _topics(board.state.run, log, stop)
    books = [(topic, p) for topic in board.state.books for p in range(there.get(topic, 0))]
    data = [
        (topic, p)
        for topic, count in sorted(there.items())
        if topic.partition(".")[0] in DATA
        for p in range(count)
    ]
    # data last: whatever a fate points at is read before it
    ends = {where: end_offset(log, *where) for where in (*books, *data)}
    starts = log.beginning_offsets(ends)
    board.total = sum(end - starts[where] for where, end in ends.items())
    with board.lock:
        state.starts |= {where: starts[where] for where in data}
    for where in books:
        if where[0] == VERSIONS:
            for piece in pieces(read(log, *where, starts[where], ends[where])):
                with board.lock:
                    for message in piece:
                        hear(state, message)
    before = 0
    for where in data:
        for piece in pieces(read(log, *where, starts[where], ends[where])):
            if stop.is_set():
                return ends
            board.fold(piece)
            board.done = before + piece[-1].offset + 1 - starts[where]
        before += ends[where] - starts[where]
        board.done = before
    for piece in pieces(
        heapq.merge(
            *(read(log, *where, starts[where], ends[where]) for where in books), key=by_time
        )
    ):
        if stop.is_set():
            break
        board.fold(piece)
    return ends


def _topics(run: RunFile, log: Log, stop: threading.Event) -> dict[str, int]:
    """The topics of the run, waited for while it is starting. Raises TopicMissing."""
    deadline = time.monotonic() + TOPICS_LIMIT_S
    needed = {
        VERSIONS,
        topology.FATES,
        topology.METRICS,
        *(topology.rollouts(env) for env in run.envs),
    }
    while missing := needed - (there := log.topics()).keys():
        if time.monotonic() > deadline or stop.wait(POLL_S):
            raise TopicMissing(
                f"run {run.run!r} has no topic {min(missing)}; create its topics with `streamrl"
                " topics apply RUN.yaml`"
            )
    return there


def pieces(messages: Iterator[Message]) -> Iterator[list[Message]]:
    while piece := list(islice(messages, AT_ONCE)):
        yield piece


# ---- one record, when somebody asks for it -------------------------------------------------------


def rollout_at(log: Log, place: RolloutLocation) -> Rollout | str:
    """The rollout that lies there, or why it cannot be read."""
    topic = topology.rollouts(place.env)
    try:
        message = next(read(log, topic, place.partition, place.offset, place.offset + 1), None)
    except InputGone:
        message = None
    if message is None:
        return "its tokens are gone: retention has removed the record"
    record = to_event(message, ("rollout",)).record
    return (
        record
        if isinstance(record, Rollout)
        else f"the record cannot be read: {getattr(record, 'cause', 'it is empty')}"
    )


def batch_at(log: Log, offset: int) -> Batch | None:
    """The batch that lies there; None where it cannot be read any more."""
    try:
        message = next(
            read(log, *topology.sole_partition(topology.BATCHES), offset, offset + 1), None
        )
    except StreamrlError:
        return None
    record = None if message is None else to_event(message, ("batch",)).record
    return record if isinstance(record, Batch) else None
