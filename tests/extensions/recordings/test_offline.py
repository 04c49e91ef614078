"""A processor's steps in a log that nobody else writes to: they are its first transactions."""

from __future__ import annotations

import pytest

from streamrl.extensions.recordings.offline import open_writer, run_steps
from streamrl.extensions.recordings.parent_schedule import Step
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.reading import read
from streamrl.stream.processor.restore import restore
from streamrl.system.errors import Fenced
from tests.support.adder import TOPICS, filled, make_processor, number, sums


def test_a_processor_goes_on_behind_the_steps_that_were_made_for_it():
    log = filled(12)
    messages = list(read(log, "a", 0, 0))
    run_steps(
        log, make_processor(), [Step(1.0, messages[:4]), Step(2.0, messages[4:])], {("b", 0): 3}
    )
    assert [each.wanted_tokens for each in sums(log)] == [0 + 2 + 4, 0 + 2 + 4 + 6 + 8 + 10]
    assert len(list(read(log, "metrics", 0, 0))) == 2
    current, _ = restore(log, make_processor())
    assert (current.sequence, current.state.held) == (1, [])
    assert current.offsets == {("b", 0): 3, ("a", 0): messages[-1].offset + 1}


def test_a_step_without_messages_is_made():
    log = MemoryLog(TOPICS)
    run_steps(log, make_processor(), [Step(1.0, [])], {})
    current, _ = restore(log, make_processor())
    assert current.sequence == 0


def test_a_writer_is_there_for_its_block():
    log = MemoryLog(TOPICS)
    with open_writer(log, "fork") as writer:
        writer.commit([number("a", 1)])
    assert [message.value for message in read(log, "a", 0, 0)] == [number("a", 1).value]
    with pytest.raises(Fenced):
        writer.commit([number("a", 2)])
