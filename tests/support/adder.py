"""A processor that counts, for tests of the loop: it holds a few events and publishes their sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.stream.log.codec import decode, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Event, Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Demand, EnvProgress, Metric

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


def make_processor(
    config: Config | None = None, snapshot_events: int = 4
) -> Processor[Config, State]:
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


def run_once(
    log: MemoryLog,
    cuts: Sequence[int],
    die_at: int | None = None,
    each: Processor[Config, State] | None = None,
) -> ProcessorState[Config, State]:
    """One life: restore, then turns of the given sizes until the inputs are drained; dies before or
    after the commit number `die_at // 2`.
    """
    me = each or make_processor()
    writer = log.writer(me.name)
    fold, _ = restore(log, me)
    tps = [(topic, 0) for topic in me.inputs]
    reader = log.reader({tp: fold.offsets.get(tp, 0) for tp in tps})
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
        process_batch(
            me, fold, messages, 1.0, commit, lambda: {tp: reader.position(*tp) for tp in tps}
        )
    raise AssertionError


def sums(log: MemoryLog) -> list[Demand]:
    return [
        record
        for m in read(log, "sums", 0, 0)
        if isinstance(record := decode("demand/1", m.value or b""), Demand)
    ]
