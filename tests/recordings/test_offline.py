"""A processor's steps in a log that nobody else writes to: they are its first transactions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.errors import Fenced
from streamrl.log.memory import MemoryLog
from streamrl.log.reading import read
from streamrl.processor.restore import restore
from streamrl.recordings.offline import open_writer, run_steps
from streamrl.recordings.parent_schedule import Step
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


@pytest.mark.parametrize("is_due", [False, True])
def test_a_step_without_messages_is_made_if_it_is_due(is_due: bool):
    log = MemoryLog(TOPICS)
    processor = replace(make_processor(), due=lambda config, state, time_s: is_due)
    run_steps(log, processor, [Step(1.0, [])], {})
    assert restore(log, processor)[0].sequence == (0 if is_due else -1)


def test_a_writer_is_there_for_its_block():
    log = MemoryLog(TOPICS)
    with open_writer(log, "fork") as writer:
        writer.commit([number("a", 1)])
    assert [message.value for message in read(log, "a", 0, 0)] == [number("a", 1).value]
    with pytest.raises(Fenced):
        writer.commit([number("a", 2)])
