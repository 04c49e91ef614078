"""The loop in memory: a part that counts, killed at every point between two operations, must come
out where an undisturbed one does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import msgspec
import pytest

from streamrl.errors import StreamrlError
from streamrl.log import chunks
from streamrl.log.codec import decode, to_message
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Event, Message, Output, end_offset, read
from streamrl.processor import processor
from streamrl.processor.definition import Processor, ProcessorState
from streamrl.processor.journal import last_record
from streamrl.processor.processor import (
    FETCH_RECORDS,
    MAX_POLL_RECORDS,
    drain_available,
    run_processor,
)
from streamrl.processor.restore import restore
from streamrl.processor.snapshots import serialize_state, to_snapshot
from streamrl.processor.transaction import process_batch
from streamrl.records import Demand, EnvProgress, JournalEntry, Metric, Snapshot
from tests.support import life
from tests.support.waiting import patience

TOPICS = {"a": 1, "b": 1, "sums": 1, "metrics": 1, "dead-letters.a": 1, "journal.adder": 1}


class Config(msgspec.Struct, frozen=True):
    hold: int = 3  # events held before their sum goes out


class State(msgspec.Struct):
    held: list[Event] = []
    total: int = 0


def step(
    config: Config, state: State, events: Iterable[Event], time_s: float
) -> tuple[State, list[Output]]:
    outputs: list[Output] = []
    for event in events:
        state.held.append(event)
        if len(state.held) >= config.hold:
            state.total += sum(
                e.record.next_problem for e in state.held if isinstance(e.record, EnvProgress)
            )
            state.held = []
            record = Demand(
                environment="x",
                wanted_tokens=state.total,
                held_tokens=event.offset,
                closed_groups={},
            )
            outputs += [
                Output("sums", "x", record),
                Output("metrics", "x", Metric(source="adder", time_s=time_s, values={})),
            ]
    return state, outputs


def part(config: Config | None = None, snapshot_events: int = 4) -> Processor[Config, State]:
    return Processor(
        "adder",
        {"a": ("env-progress",), "b": ("env-progress",)},
        config or Config(),
        State,
        step,
        snapshot_events=snapshot_events,
    )


def number(topic: str, value: int) -> Message:
    return to_message(Output(topic, "k", EnvProgress(producer="p", next_problem=value)))


def filled(count: int = 20) -> MemoryLog:
    log = MemoryLog(TOPICS)
    writer = log.writer("source")
    for i in range(0, count, 2):
        writer.commit([number("a", i), number("b", i + 1)])
    return log


class Killed(Exception):
    """The process is gone."""


def live(
    log: MemoryLog,
    cuts: Sequence[int],
    die_at: int | None = None,
    each: Processor[Config, State] | None = None,
) -> ProcessorState[Config, State]:
    """One life: restore, then turns of the given sizes until the inputs are drained; dies before or
    after the commit number `die_at // 2`.
    """
    me = each or part()
    writer = log.writer(me.name)
    fold, _ = restore(log, me)
    reader = log.reader({(topic, 0): fold.offsets.get((topic, 0), 0) for topic in me.inputs})
    operations = itertools.count()

    def commit(messages: Sequence[Message]) -> int:
        if next(operations) == die_at:
            raise Killed
        offset = writer.commit(messages)
        if next(operations) == die_at:
            raise Killed
        return offset

    for size in itertools.cycle(cuts):
        messages = reader.poll(size, 0)
        if not messages:
            return fold
        process_batch(me, fold, messages, 1.0, commit)
    raise AssertionError


def sums(log: MemoryLog) -> list[Demand]:
    return [
        record
        for m in read(log, "sums", 0, 0)
        if isinstance(record := decode("demand/1", m.value or b""), Demand)
    ]


def test_a_turn_is_one_transaction_with_its_journal_entry():
    log = filled(6)
    live(log, [4])
    records = [
        decode(dict(m.headers)["schema"], m.value or b"") for m in read(log, "journal.adder", 0, 0)
    ]
    first = records[1]  # the snapshot after four events comes before its entry
    assert isinstance(records[0], Snapshot) and isinstance(first, JournalEntry)
    assert [(s.topic, s.start, s.end, s.count) for s in first.slices] == [
        ("a", 0, 5, 3),
        ("b", 0, 1, 1),
    ]
    assert (first.sequence, first.output_count, first.config, first.snapshot_offset) == (
        0,
        1,
        '{"hold":3}',
        -1,
    )
    second = records[2]
    assert isinstance(second, JournalEntry) and (second.config, second.snapshot_offset) == ("", 0)
    # that is for people to look at, once a second: the entries say it
    assert log.committed_offsets("adder") == {}


@pytest.mark.parametrize(("lying", "taken"), [(70, 70), (2 * MAX_POLL_RECORDS, MAX_POLL_RECORDS)])
def test_a_turn_takes_what_lies_ready_a_piece_at_a_time(lying: int, taken: int):
    log = MemoryLog({"a": 1})
    source = log.producer()
    for i in range(lying):
        source.send(number("a", i))
    reader = log.reader({("a", 0): 0})
    folded = 0
    ahead = list[int]()
    for message in drain_available(reader, reader.poll(FETCH_RECORDS, 0)):
        ahead.append(reader.position("a", 0) - message.offset)  # fetched, and not folded in yet
        folded += 1
    assert folded == taken == reader.position("a", 0) and max(ahead) == FETCH_RECORDS


def test_a_turn_is_cut_by_bytes_too(monkeypatch: pytest.MonkeyPatch):
    log = MemoryLog({"a": 1})
    source = log.producer()
    for i in range(2 * MAX_POLL_RECORDS):
        source.send(number("a", i))
    sizes = [len(message.value or b"") for message in read(log, "a", 0, 0)]
    monkeypatch.setattr(processor, "MAX_POLL_BYTES", sum(sizes[: 3 * FETCH_RECORDS]))
    reader = log.reader({("a", 0): 0})
    assert len(list(drain_available(reader, reader.poll(FETCH_RECORDS, 0)))) == 3 * FETCH_RECORDS


@pytest.mark.parametrize("cuts", [[1], [3], [7, 1, 2]])
@pytest.mark.parametrize("snapshot_events", [1, 4, 1000])
def test_killed_at_any_point_it_ends_where_an_undisturbed_one_does(
    cuts: list[int], snapshot_events: int
):
    me = part(snapshot_events=snapshot_events)
    undisturbed = filled()
    expected = live(undisturbed, cuts, each=me)
    for die_at in range(2 * (expected.sequence + 1)):
        log = filled()
        with pytest.raises(Killed):
            live(log, cuts, die_at, each=me)
        fold = live(log, cuts, each=me)
        assert serialize_state(fold.state) == serialize_state(expected.state)
        assert [d.wanted_tokens for d in sums(log)] == [d.wanted_tokens for d in sums(undisturbed)]


@pytest.mark.parametrize("snapshot_events", [1, 4, 1000])
def test_metrics_of_a_transaction_after_which_it_was_killed_come_from_the_next_life(
    snapshot_events: int,
):
    log = filled(12)
    me = part(snapshot_events=snapshot_events)
    with pytest.raises(Killed):
        # behind the second commit; the turns of this life publish no metrics at all
        live(log, [6], die_at=3, each=me)
    assert end_offset(log, "metrics", 0) == 0
    life.live(lambda stop: run_processor(log, me, stop), lambda: end_offset(log, "metrics", 0) >= 2)
    found = [
        record
        for m in read(log, "metrics", 0, 0)
        if isinstance(record := decode("metric/1", m.value or b""), Metric)
    ]
    # the two sums of the second turn, with its time
    assert [record.time_s for record in found if not record.values] == [1.0, 1.0]
    assert len(sums(log)) == 4


def test_a_restart_reads_the_window_and_not_the_past():
    log = filled(200)
    live(log, [2], each=part(snapshot_events=20))
    _, records_read = restore(log, part())
    assert records_read < 30


@pytest.mark.parametrize("missing", [False, True])
def test_a_snapshot_in_parts_of_an_earlier_log_is_read(missing: bool):
    """One that lacks a part is passed over, and the one before it is used."""
    log = filled()
    me = part(snapshot_events=6)
    fold = live(log, [2], each=me)
    whole = to_snapshot(fold, fold.offsets)
    parts = [
        msgspec.structs.replace(whole, state=whole.state[i : i + 2], part=i // 2)
        for i in range(0, len(whole.state), 2)
    ]
    assert len(parts) > 2
    parts = [msgspec.structs.replace(record, parts=len(parts)) for record in parts]
    begin = end_offset(log, "journal.adder", 0)
    log.writer(me.name).commit(
        [to_message(Output("journal.adder", "adder", r)) for r in parts[: -1 if missing else None]]
    )
    again, _ = restore(log, me)
    assert (again.snapshot_offset == begin) == (not missing)
    assert again.sequence == fold.sequence
    assert serialize_state(again.state) == serialize_state(fold.state)


def test_in_a_journal_that_begins_within_a_large_snapshot_the_last_entry_is_found(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(chunks, "MESSAGE_BYTES", 500)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    log = MemoryLog(TOPICS)
    large = Snapshot(sequence=3, positions=[], state=bytes(2_000), config="{}")
    entry = JournalEntry(sequence=4, time_s=1.0, slices=[], digest=b"", output_count=0)
    log.writer("adder").commit(
        [to_message(Output("journal.adder", "adder", record)) for record in (large, entry)]
    )
    log.delete_before({("journal.adder", 0): 2})
    assert last_record(log, "journal.adder", JournalEntry) == entry


def test_settings_may_change_between_two_lives():
    log = filled(10)
    live(log, [2])
    for more in (number("a", 100), number("a", 101)):
        log.writer("source").commit([more])
    fold = live(log, [2], each=part(Config(hold=2)))
    configs = [
        r.config
        for m in read(log, "journal.adder", 0, 0)
        if isinstance(r := decode(dict(m.headers)["schema"], m.value or b""), JournalEntry)
        and r.config
    ]
    assert configs == ['{"hold":3}', '{"hold":2}']
    assert serialize_state(restore(log, part(Config(hold=2)))[0].state) == serialize_state(
        fold.state
    )


def test_code_that_gives_other_outputs_is_found_at_restart():
    def wrong(
        config: Config, state: State, events: Iterable[Event], time_s: float
    ) -> tuple[State, list[Output]]:
        state, outputs = step(config, state, events, time_s)
        return state, outputs[:0]

    log = filled()
    live(log, [5], each=part(snapshot_events=1000))
    with pytest.raises(
        StreamrlError, match=r"adder: entry 0 gives 0 outputs that differ from the 1 recorded"
    ):
        restore(log, Processor("adder", part().inputs, Config(), State, wrong))


def test_what_cannot_be_read_is_put_aside_and_the_part_goes_on():
    log = filled(2)
    log.writer("source").commit(
        [Message("a", b"k", b"\xc1", (("schema", b"env-progress/1"),)), number("a", 5)]
    )
    fold = live(log, [10])
    (letter,) = read(log, "dead-letters.a", 0, 0)
    headers = dict(letter.headers)
    assert (
        letter.value == b"\xc1"
        and headers["__connect.errors.offset"] == b"2"
        and b"malformed" in headers["__connect.errors.exception.message"]
    )
    assert fold.state.total == 0 + 1 + 5


def test_run_follows_its_inputs_until_it_is_told_to_stop():
    log = filled(2)
    stop = threading.Event()
    thread = threading.Thread(target=run_processor, args=(log, part(), stop))
    thread.start()
    log.writer("source").commit([number("a", 40), number("b", 2)])
    reader = log.reader({("sums", 0): 0})
    assert reader.poll(1, patience(30))
    stop.set()
    thread.join(patience(30))
    assert not thread.is_alive() and sums(log)[0].wanted_tokens == 0 + 1 + 40
