"""The last resort: a partition is cut after a record that no client survives."""

from __future__ import annotations

import pytest

from streamrl.extensions.recordings.dead_letters import letters
from streamrl.extensions.recordings.skip import CAUSE, skip
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, beginning_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import Fate
from streamrl.system.errors import ConfigError

TOPICS = {"rollouts.copy": 1, "dead-letters.rollouts.copy": 1, "fates": 1, "turns.agents": 1}


def filled() -> MemoryLog:
    log = MemoryLog(TOPICS)
    for topic in ("rollouts.copy", "turns.agents"):
        log.append([Message(topic, b"k", b"%d" % number) for number in range(5)], marker=False)
    return log


def test_the_record_and_those_before_it_are_gone_and_it_has_a_letter_and_a_fate():
    log = filled()
    assert skip(log, "rollouts.copy[0]@3") == 3
    assert [message.value for message in read(log, "rollouts.copy", 0)] == [b"4"]
    (letter,) = letters(log, "rollouts.copy")
    assert (str(letter), letter.cause, letter.is_whole) == ("rollouts.copy[0]@3", CAUSE, False)
    (message,) = read(log, "fates", 0)
    fate = to_event(message, ("fate",)).record
    assert isinstance(fate, Fate) and (fate.fate, fate.offsets.tolist()) == ("invalid", [3])


def test_of_a_topic_without_dead_letters_the_record_is_just_deleted():
    log = filled()
    assert skip(log, "turns.agents[0]@0") == 0
    assert beginning_offset(log, "turns.agents", 0) == 1


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("rollouts.copy[0]@5", "has offsets 0 to 4"),
        ("rollouts.copy[1]@0", "no topic rollouts.copy with a partition 1"),
        ("rollouts.add[0]@0", "no topic rollouts.add with a partition 0"),
        ("rollouts.copy", "is not the place of a record"),
    ],
)
def test_a_place_where_no_record_is_is_named_and_nothing_is_deleted(place: str, wrong: str):
    log = filled()
    with pytest.raises(ConfigError, match=wrong):
        skip(log, place)
    assert beginning_offset(log, "rollouts.copy", 0) == 0
