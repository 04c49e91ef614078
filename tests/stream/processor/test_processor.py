"""The loop in memory: a part that counts, killed at every point between two operations, must come
out where an undisturbed one does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from streamrl.stream.log.codec import decode
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Event, Output, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.stream.processor import processor
from streamrl.stream.processor.awake_clock import AwakeClock
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.processor import (
    FETCH_RECORDS,
    MAX_POLL_RECORDS,
    Backlog,
    drain_available,
    note_unsaved,
    run_processor,
    start,
)
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.records import JournalEntry, Metric
from streamrl.system.errors import StreamrlError
from tests.support import life
from tests.support.adder import (
    TOPICS,
    Config,
    Killed,
    State,
    filled,
    make_processor,
    number,
    run_once,
    step,
    sums,
)
from tests.support.waiting import patience


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
    me = make_processor(snapshot_events=snapshot_events)
    undisturbed = filled()
    expected = run_once(undisturbed, cuts, each=me)
    for die_at in range(2 * (expected.sequence + 1)):
        log = filled()
        with pytest.raises(Killed):
            run_once(log, cuts, die_at, each=me)
        fold = run_once(log, cuts, each=me)
        assert serialize_state(fold.state) == serialize_state(expected.state)
        assert [d.wanted_tokens for d in sums(log)] == [d.wanted_tokens for d in sums(undisturbed)]


@pytest.mark.parametrize("snapshot_events", [1, 4, 1000])
def test_metrics_of_a_transaction_after_which_it_was_killed_come_from_the_next_life(
    snapshot_events: int,
):
    log = filled(12)
    me = make_processor(snapshot_events=snapshot_events)
    with pytest.raises(Killed):
        # behind the second commit; the turns of this life publish no metrics at all
        run_once(log, [6], die_at=3, each=me)
    assert end_offset(log, "metrics", 0) == 0
    life.run_until(
        lambda stop: run_processor(log, me, stop), lambda: end_offset(log, "metrics", 0) >= 2
    )
    metrics = [
        record
        for m in read(log, "metrics", 0, 0)
        if isinstance(record := decode("metric/1", m.value or b""), Metric)
    ]
    # the two sums of the second turn, with its time
    assert [record.time_s for record in metrics if not record.values] == [1.0, 1.0]
    assert len(sums(log)) == 4


def test_a_restart_reads_the_window_and_not_the_past():
    log = filled(200)
    run_once(log, [2], each=make_processor(snapshot_events=20))
    _, records_read = restore(log, make_processor())
    assert records_read < 30


def test_settings_may_change_between_two_lives():
    log = filled(10)
    run_once(log, [2])
    for more in (number("a", 100), number("a", 101)):
        log.writer("source").commit([more])
    fold = run_once(log, [2], each=make_processor(Config(hold=2)))
    configs = [
        r.config
        for m in read(log, "journal.adder", 0, 0)
        if isinstance(r := decode(dict(m.headers)["schema"], m.value or b""), JournalEntry)
        and r.config
    ]
    assert configs == ['{"hold":3}', '{"hold":2}']
    assert serialize_state(
        restore(log, make_processor(Config(hold=2)))[0].state
    ) == serialize_state(fold.state)


def test_code_that_gives_other_outputs_is_found_at_restart():
    def wrong(
        config: Config, state: State, events: Iterable[Event], time_s: float
    ) -> tuple[State, list[Output]]:
        state, outputs = step(config, state, events, time_s)
        return state, outputs[:0]

    log = filled()
    run_once(log, [5], each=make_processor(snapshot_events=1000))
    with pytest.raises(
        StreamrlError, match=r"adder: entry 0 gives 0 outputs that differ from the 1 recorded"
    ):
        restore(log, Processor("adder", make_processor().inputs, Config(), State, wrong))


def test_run_follows_its_inputs_until_it_is_told_to_stop():
    log = filled(2)
    stop = threading.Event()
    thread = threading.Thread(target=run_processor, args=(log, make_processor(), stop))
    thread.start()
    log.writer("source").commit([number("a", 40), number("b", 2)])
    reader = log.reader({("sums", 0): 0})
    assert reader.poll(1, patience(30))
    stop.set()
    thread.join(patience(30))
    assert not thread.is_alive() and sums(log)[0].wanted_tokens == 0 + 1 + 40


def test_what_retention_deletes_after_the_last_record_of_an_input_was_no_record_to_it():
    """A transaction that was aborted follows the last record of `a`. The processor has no entry
    after it: its snapshots are made by the events of `b`, and its life ends as by SIGKILL.
    """
    log = filled(4)
    log.append([number("a", 0)] * 3, marker=True)
    partition = log._partitions["a", 0]  # pyright: ignore[reportPrivateUsage]
    partition[-4:] = [None] * 4  # no reader sees an aborted record
    log.writer("source").commit([number("b", 1)] * 4)
    processor = make_processor(snapshot_events=4)
    run_once(log, [64], each=processor)
    log.delete_before({("a", 0): end_offset(log, "a", 0)})
    stop = threading.Event()
    stop.set()
    run_processor(log, processor, stop)


def test_a_processor_that_only_reads_markers_saves_that_it_has_after_a_while():
    current = ProcessorState[Config, State](State(), offsets={("a", 0): 3, ("b", 0): 2})
    note_unsaved(current, {("a", 0): 3, ("b", 0): 2}, 7.0)
    assert current.unsaved_since_s is None
    note_unsaved(current, {("a", 0): 3, ("b", 0): 5}, 8.0)
    note_unsaved(current, {("a", 0): 3, ("b", 0): 6}, 9.0)
    assert current.unsaved_since_s == 8.0


def test_a_topic_that_was_deleted_and_made_again_is_read_from_its_beginning():
    log = filled(4)
    processor = replace(make_processor(snapshot_events=1), expires_removed=True)
    run_once(log, [64], each=processor)
    log.add("a", 1)
    log.append([number("a", 0)], marker=False)
    writer = RetryingWriter(log, processor.name, processor.journal)
    current, _ = start(log, processor, writer, lambda: 1.0)
    assert current.offsets["a", 0] == 0


class Clocked(msgspec.Struct):
    """A state that notes at each step whether the backlog was unread."""

    clock: AwakeClock = msgspec.field(default_factory=AwakeClock)
    behind: list[bool] = []


def note_step(
    config: Config, state: Clocked, events: Iterable[Event], time_s: float
) -> tuple[Clocked, list[Output]]:
    for _ in events:
        pass
    state.clock.advance(time_s)
    state.behind.append(state.clock.is_behind)
    return state, []


def clocked() -> Processor[Config, Clocked]:
    inputs = make_processor().inputs
    return Processor("adder", inputs, Config(), Clocked, note_step, clock=lambda state: state.clock)


def test_a_part_is_behind_until_it_has_read_what_was_in_the_log_at_its_start():
    """1,400 records are two steps and a part of a third one. What comes while the part is away is
    a backlog, too: here a single record, which one step reads.
    """
    log = MemoryLog(TOPICS)
    times = itertools.count(1000.0)
    for count in (1_400, 1):
        end = log.end_offsets([("a", 0)])["a", 0] + count
        log.writer("source").commit([number("a", i) for i in range(count)])

        def is_read(end: int = end) -> bool:
            return restore(log, clocked())[0].offsets.get(("a", 0), 0) >= end

        life.run_until(
            lambda stop: run_processor(log, clocked(), stop, lambda: next(times)), is_read
        )
    state = restore(log, clocked())[0].state
    assert state.behind == [True, True, True, False]
    assert 0 < state.clock.awake_s <= 2.0


def test_a_topic_that_is_not_wanted_now_does_not_hold_the_clock():
    log = filled(4)
    reader = log.reader({("a", 0): 0, ("b", 0): 0})
    backlog = Backlog(dict(log.end_offsets([("a", 0), ("b", 0)])))
    assert backlog.is_unread(reader, paused=())
    assert backlog.is_unread(reader, paused={"a"})
    assert not backlog.is_unread(reader, paused={"a", "b"})
    reader.poll(100, 0.0)
    reader.poll(100, 0.0)  # over the marker behind the last record
    assert not backlog.is_unread(reader, paused=())
    log.writer("source").commit([number("a", 7)])
    assert not backlog.is_unread(reader, paused=()), "it came after the start"
