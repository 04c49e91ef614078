"""A restored state is brought in line with today's configuration, and with what is left in
the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from streamrl.stream.log.codec import decode
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Offsets, Output, TopicPartition
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.reconcile import reconcile
from streamrl.stream.processor.retention import NOTHING_LEFT
from streamrl.stream.records import Demand, JournalEntry
from streamrl.system.errors import InputGone
from tests.support.adder import Config, State, filled, make_processor, run_once

NONE: dict[TopicPartition, int] = {("a", 0): 0, ("b", 0): 0}


def let_go(
    config: Config, state: State, removed: Offsets, time_s: float
) -> tuple[State, list[Output]]:
    """Empties the state, and says how much it was."""
    demand = Demand(environment="x", wanted_tokens=len(state.held), held_tokens=0, closed_groups={})
    return State(), [Output("sums", "x", demand)]


def lived(count: int = 4) -> tuple[MemoryLog, ProcessorState[Config, State]]:
    """It has taken `count` events, of which it still holds one."""
    log = filled(count)
    return log, run_once(log, [count], each=make_processor())


def reconciled(
    log: MemoryLog,
    processor: Processor[Config, State],
    current: ProcessorState[Config, State],
    begin: Offsets,
) -> tuple[list[str], list[Any]]:
    """The warnings, and what was committed."""
    committed = list[Message]()

    def commit(messages: Sequence[Message]) -> int:
        committed.extend(messages)
        return len(committed) - 1

    warnings = reconcile(log, processor, current, begin, 5.0, commit)
    records = [decode(dict(m.headers)["schema"], m.value or b"") for m in committed]
    return warnings, records


def test_a_processor_without_a_past_and_one_for_which_nothing_has_changed_are_left_alone():
    log, current = lived()
    assert reconciled(log, replace(make_processor(), reconcile=let_go), current, NONE) == ([], [])
    first = ProcessorState[Config, State](State())
    assert reconciled(log, make_processor(Config(hold=9)), first, {("a", 0): 99}) == ([], [])


def test_under_another_configuration_it_lets_go_in_an_entry_of_its_own():
    log, current = lived()
    other = replace(make_processor(Config(hold=9)), reconcile=let_go)
    warnings, (demand, entry) = reconciled(log, other, current, NONE)
    assert warnings == [] and demand.wanted_tokens == 1 and current.state.held == []
    assert isinstance(entry, JournalEntry)
    assert (entry.slices, entry.removed, entry.config) == ([], [], '{"hold":9}')
    assert (entry.time_s, entry.output_count) == (5.0, 1)


def test_what_it_has_not_read_and_is_deleted_ends_it_unless_it_may_go_on_without():
    log, current = lived()
    read_to = current.offsets["a", 0]
    begin = {**NONE, ("a", 0): read_to + 2}
    with pytest.raises(
        InputGone,
        match=r"^adder: retention has deleted records that it holds or has not read, or"
        r" their topic was deleted and made again: a\[0\] below"
        rf" offset {read_to + 2}; to continue without them: --set topics.on_removed=expire$",
    ):
        reconciled(log, make_processor(), current, begin)
    may = replace(make_processor(), expires_removed=True)
    (warning,), (entry,) = reconciled(log, may, current, begin)
    assert warning.endswith("it continues without them (topics.on_removed: expire)")
    assert entry.removed == [("a", 0, read_to + 2)]
    assert current.offsets["a", 0] == read_to + 2


def test_a_topic_that_was_made_again_ends_it_unless_it_may_continue_without_what_it_had():
    log, current = lived()
    read_to = current.offsets["a", 0]
    log.add("a", 1)
    with pytest.raises(InputGone, match=rf"made again: a\[0\] below offset {read_to};"):
        reconciled(log, make_processor(), current, NONE)
    may = replace(make_processor(), expires_removed=True)
    _, (entry,) = reconciled(log, may, current, NONE)
    assert entry.removed == [("a", 0, read_to)]


def test_of_a_topic_of_which_nothing_was_left_nothing_is_missing_when_it_is_made_again():
    log, current = lived()
    current.offsets["a", 0] = NOTHING_LEFT
    assert reconciled(log, make_processor(), current, NONE) == ([], [])
