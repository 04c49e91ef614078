"""What every log promises (`stream/log/protocol.py`), on a broker and in memory; and what is read,
in the files of an export too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from streamrl.extensions.recordings.archive import export
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog, MemoryProducer, MemoryWriter
from streamrl.stream.log.parquet import FileLog
from streamrl.stream.log.protocol import (
    Log,
    Message,
    Offsets,
    Reader,
    TopicPartition,
    beginning_offset,
    end_offset,
)
from streamrl.stream.log.reading import portions, read
from streamrl.system.errors import Fenced, InputGone, TopicMissing
from tests.support.data_path import RUN
from tests.support.kafka import make_topics
from tests.support.waiting import until

TOPICS = {"in": 2, "out": 1}
Open = Callable[[], Log]


class Exported(Log):
    """A log in memory that is read through an export of what it holds at that moment."""

    def __init__(self, directory: Path) -> None:
        self._memory = MemoryLog(TOPICS)
        self._directory = directory

    def topics(self) -> dict[str, int]:
        return self._files().topics()

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return self._files().beginning_offsets(partitions)

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return self._files().end_offsets(partitions)

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        return self._files().reader(offsets, whole, bounded)

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        return self._memory.writer(identity)

    def producer(self, durable: bool = False) -> MemoryProducer:
        return self._memory.producer(durable)

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return self._memory.committed_offsets(identity)

    def close(self) -> None: ...

    def _files(self) -> FileLog:
        return export(self._memory, RUN, self._directory / uuid.uuid4().hex)


@pytest.fixture(params=["memory", "kafka"])
def open_log(request: pytest.FixtureRequest, run_name: str, tmp_path: Path) -> Iterator[Open]:
    """Opens the log once more, as another process would."""
    yield from opened(request, run_name, tmp_path)


@pytest.fixture(params=["memory", "kafka", "files"])
def open_recording(request: pytest.FixtureRequest, run_name: str, tmp_path: Path) -> Iterator[Open]:
    """The same, where nothing is written once it is read."""
    yield from opened(request, run_name, tmp_path)


def opened(request: pytest.FixtureRequest, run_name: str, tmp_path: Path) -> Iterator[Open]:
    if request.param == "memory":
        memory = MemoryLog(TOPICS)
        yield lambda: memory
    elif request.param == "files":
        exported = Exported(tmp_path)
        yield lambda: exported
    else:
        address = request.getfixturevalue("broker")
        make_topics(address, {f"{run_name}.{topic}": n for topic, n in TOPICS.items()})
        yield lambda: KafkaLog({"bootstrap.servers": address}, run_name)


def message(key: str, value: str, topic: str = "in", **fields: object) -> Message:
    return Message(topic, key.encode(), value.encode(), **fields)  # type: ignore[arg-type]


def drain(reader: Reader, count: int) -> list[Message]:
    found: list[Message] = []

    def enough() -> bool:
        found.extend(reader.poll(count - len(found), 0.05))
        return len(found) >= count

    until(enough, otherwise=f"{count} messages")
    return found


def settled(log: Log, count: int, topic: str = "out", partition: int = 0) -> list[Message]:
    """What lies in a partition, once `count` messages show: a transaction does so a moment after
    its commit.
    """
    messages: list[Message] = []

    def shown() -> bool:
        messages[:] = read(log, topic, partition, 0)
        return len(messages) >= count

    until(shown, otherwise=f"{topic}[{partition}] never showed {count} messages")
    return messages


def values(log: Log, count: int) -> list[str]:
    return [(m.value or b"").decode() for m in settled(log, count)]


def test_topics_are_those_of_the_run(open_recording: Open):
    assert open_recording().topics() == TOPICS


def test_a_transaction_is_read_whole_and_in_order(open_recording: Open):
    log = open_recording()
    offset = log.writer("a").commit([message("k", str(i), "out") for i in range(5)])
    assert offset == 4
    assert values(log, 5) == ["0", "1", "2", "3", "4"]


def test_headers_keys_and_tombstones_come_through(open_recording: Open):
    log = open_recording()
    log.writer("a").commit(
        [
            Message("out", b"k", b"v", (("schema", b"x/1"), ("schema", b"y/1"))),
            Message("out", b"k", None),
        ]
    )
    first, second = settled(log, 2)
    assert (first.key, first.value, first.headers, second.value) == (
        b"k",
        b"v",
        (("schema", b"x/1"), ("schema", b"y/1")),
        None,
    )
    assert first.timestamp_s > 1e9


def test_one_key_goes_to_one_partition(open_recording: Open):
    log = open_recording()
    log.writer("a").commit([message(f"g{i % 7}", str(i)) for i in range(70)])
    where = [{m.key for m in settled(log, 1, "in", p)} for p in (0, 1)]
    assert where[0] | where[1] == {f"g{i}".encode() for i in range(7)} and not where[0] & where[1]


def test_marked_positions_show(open_log: Open):
    writer = open_log().writer("a")
    writer.commit_offsets({})
    assert open_log().committed_offsets("a") == {}
    writer.commit_offsets({("in", 0): 3, ("in", 1): 0})
    assert open_log().committed_offsets("a") == {("in", 0): 3, ("in", 1): 0}
    writer.commit_offsets({("in", 1): 2}, wait=False)
    until(lambda: open_log().committed_offsets("a") == {("in", 0): 3, ("in", 1): 2})
    assert open_log().committed_offsets("b") == {}


def test_a_second_writer_of_the_same_name_fences_the_first(open_log: Open):
    first = open_log().writer("a")
    first.commit([message("k", "1", "out")])
    second = open_log().writer("a")
    with pytest.raises(Fenced, match="a: another process"):
        first.commit([message("k", "zombie", "out")])
    second.commit([message("k", "2", "out")])
    assert values(open_log(), 2) == ["1", "2"]


def test_the_end_is_behind_the_last_message_and_reading_stops_there(open_recording: Open):
    log = open_recording()
    writer = log.writer("a")
    for i in range(3):  # three transactions leave markers between
        writer.commit([message("k", str(i), "out")])
    assert values(log, 3) == ["0", "1", "2"]
    assert beginning_offset(log, "out", 0) == 0 and end_offset(log, "out", 0) >= 5
    assert list(read(log, "out", 0, end_offset(log, "out", 0))) == []


def test_starts_and_ends_of_many_are_asked_at_once(open_log: Open):
    log = open_log()
    log.writer("a").commit([message("k", "0", "out")])
    assert log.end_offsets([]) == {} and log.beginning_offsets([]) == {}
    assert log.beginning_offsets([("in", 1), ("out", 0)]) == {("in", 1): 0, ("out", 0): 0}
    until(lambda: end_offset(log, "out", 0) > 0)  # a commit returns before its marker is written
    assert log.end_offsets([("in", 0), ("in", 1), ("out", 0)]) == {
        ("in", 0): 0,
        ("in", 1): 0,
        ("out", 0): end_offset(log, "out", 0),
    }


def test_reading_between_offsets(open_recording: Open):
    log = open_recording()
    log.writer("a").commit([message("k", str(i), "out") for i in range(6)])
    settled(log, 6)
    assert [m.offset for m in read(log, "out", 0, 2, 5)] == [2, 3, 4]


def test_a_reader_follows(open_log: Open):
    log = open_log()
    writer = log.writer("a")
    reader = log.reader({("out", 0): 0})
    assert reader.poll(10, 0.05) == []
    writer.commit([message("k", "1", "out")])
    assert [m.value for m in drain(reader, 1)] == [b"1"]
    assert reader.position("out", 0) >= 1
    reader.close()


def test_a_paused_topic_gives_nothing_until_resumed(open_recording: Open):
    log = open_recording()
    log.writer("a").commit([message("k", "1", "out"), message("k", "2", "in", partition=0)])
    reader = log.reader({("out", 0): 0, ("in", 0): 0})
    reader.set_paused({"out"})
    assert [m.value for m in drain(reader, 1) + reader.poll(5, 0.2)] == [b"2"]
    reader.set_paused(())
    assert [m.value for m in drain(reader, 1)] == [b"1"]
    reader.close()


def test_plain_messages_arrive(open_recording: Open):
    log = open_recording()
    writer = log.producer()
    writer.send(message("k", "1", "out"))
    writer.flush()
    writer.close()
    assert values(log, 1) == ["1"]


def test_a_plain_message_has_a_place_once_it_is_written(
    open_log: Open, monkeypatch: pytest.MonkeyPatch
):
    log = open_log()
    writer = log.producer(durable=True)
    places: dict[str, tuple[int, int]] = {}

    def write(key: str, value: str) -> None:
        writer.send(message(key, value), lambda *place: places.update({value: place}))

    for number in range(6):
        write(f"k{number}", str(number))
    until(lambda: len(places) == 6)
    found = [m for p in (0, 1) for m in read(log, "in", p)]
    assert {(m.value or b"").decode(): (m.partition, m.offset) for m in found} == places
    # that of a record in chunks is the place of its last chunk
    monkeypatch.setattr("streamrl.stream.log.chunks.MESSAGE_BYTES", 2_000)
    long = "x" * 5_000
    write("k0", long)
    until(lambda: long in places)
    (whole,) = [m for p in (0, 1) for m in read(log, "in", p) if m.value == long.encode()]
    assert (whole.partition, whole.offset) == places[long]
    writer.close()


def test_a_missing_topic_is_named(open_recording: Open):
    log = open_recording()
    with pytest.raises(TopicMissing, match="nowhere"):
        log.writer("a").commit([message("k", "v", "nowhere")])
    with pytest.raises(TopicMissing, match="nowhere"):
        log.reader({("nowhere", 0): 0})
    with pytest.raises(TopicMissing, match="nowhere"):
        end_offset(log, "nowhere", 0)


def test_an_offset_that_is_gone_is_an_error_and_no_jump(open_recording: Open):
    log = open_recording()
    log.writer("a").commit([message("k", "v", "out")])
    settled(log, 1)
    reader = log.reader({("out", 0): 1000})
    with pytest.raises(InputGone, match="1000"):
        for _ in range(200):
            reader.poll(1, 0.05)
    reader.close()


def test_portions_are_bounded_in_messages_and_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.stream.log.reading.PORTION_BYTES", 10)
    monkeypatch.setattr("streamrl.stream.log.reading.PORTION_MESSAGES", 3)
    sizes = [1, 1, 1, 1, 9, 1, 30, 1]
    found = [
        [len(m.value or b"") for m in some]
        for some in portions(message("k", "x" * size) for size in sizes)
    ]
    assert found == [[1, 1, 1], [1, 9], [1, 30], [1]]


def test_a_reader_moves_between_its_partitions_and_reads_one_at_a_time(open_recording: Open):
    log = open_recording()
    writer = log.writer("one")
    for number in range(3):
        writer.commit([message("k", f"{p}.{number}", partition=p) for p in range(2)])
    settled(log, 3, "in", 0)
    settled(log, 3, "in", 1)
    reader = open_recording().reader({("in", 0): 0, ("in", 1): 0}, bounded=True)

    def values_of(partition: int, count: int) -> list[str]:
        found = [(m.value or b"").decode() for m in drain(reader, count)]
        assert reader.position("in", partition) > 0
        return found

    reader.seek({("in", 1): 0})
    assert values_of(1, 3) == ["1.0", "1.1", "1.2"]
    reader.seek({("in", 0): 0})
    assert values_of(0, 2) == ["0.0", "0.1"]
    after_two = reader.position("in", 0)
    reader.seek({("in", 1): 2})
    assert values_of(1, 2) == ["1.1", "1.2"]
    reader.seek({("in", 0): after_two})
    assert values_of(0, 1) == ["0.2"]
    reader.close()
