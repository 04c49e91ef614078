from __future__ import annotations

import hashlib

import numpy as np

from streamrl.stream.log.chunks import size_of
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.dead_letters import (
    HEAD_BYTES,
    parse_dead_letter,
    requeue,
    requeued_offset,
    to_dead_letter,
)
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Fate
from tests.support.build import rollout

RUBBISH = Message(
    "rollouts.copy", b"\xff\x00key", b"\xc1", (("schema", b"rollout/1"), ("trace", b"\x01")), 1, 7
)


def letter_message(message: Message = RUBBISH) -> Message:
    event = to_event(message, ("rollout",))
    letter, _ = to_dead_letter(event, event.record.cause)  # type: ignore[union-attr]
    return to_message(letter)._replace(partition=0, offset=3)


def test_a_letter_is_the_record_as_it_came_with_what_is_wrong():
    message = letter_message()
    assert (message.topic, message.key, message.value) == (
        "dead-letters.rollouts.copy",
        RUBBISH.key,
        RUBBISH.value,
    )
    assert message.headers[:2] == RUBBISH.headers
    letter = parse_dead_letter(message)
    assert (
        letter is not None and letter[:3] == ("rollouts.copy", 1, 7) and "malformed" in letter.cause
    )
    assert str(letter) == "rollouts.copy[1]@7"


def test_a_requeued_letter_is_what_came_and_a_marker_says_so():
    letter = parse_dead_letter(letter_message())
    assert letter is not None
    record, marker = requeue(letter)
    assert record == RUBBISH._replace(partition=-1, offset=-1)  # by its key, as its sender would
    assert (
        marker.topic == "dead-letters.rollouts.copy"
        and marker.partition == 0
        and requeued_offset(marker) == 3
    )
    assert parse_dead_letter(marker) is None and requeued_offset(letter_message()) is None


def test_a_rollout_that_can_be_read_is_kept_as_it_came_too():
    sent = to_message(Output("rollouts.copy", "g0", rollout()))
    event = to_event(
        sent._replace(headers=(*sent.headers, ("trace", b"7")), partition=0, offset=2), ("rollout",)
    )
    letter = to_message(to_dead_letter(event, "no")[0])
    assert letter.value == sent.value and letter.headers[:2] == (*sent.headers, ("trace", b"7"))


def test_what_others_write_there_is_no_letter():
    for headers in (
        (),
        (("__connect.errors.offset", b"x"),),
        (("__connect.errors.topic", b"\xff"), ("__connect.errors.offset", b"1")),
    ):
        message = Message("dead-letters.rollouts.copy", None, b"x", headers, 0, 0)
        assert parse_dead_letter(message) is None and requeued_offset(message) is None


def test_a_cause_is_one_short_line_that_a_terminal_survives():
    event = to_event(to_message(Output("rollouts.copy", "g0", rollout())), ("rollout",))
    letter, fate = to_dead_letter(event, "bad\n" + "x" * 10_000)
    assert (
        isinstance(fate.record, Fate)
        and len(fate.record.cause) < 310
        and "\n" not in fate.record.cause
    )
    assert sum(len(value) for _, value in letter.record.headers) < 1000  # type: ignore[union-attr]


def test_a_rollout_that_can_be_read_is_named_by_its_fate():
    event = to_event(
        to_message(Output("rollouts.copy", "g0", rollout(version=3)))._replace(
            partition=1, offset=5
        ),
        ("rollout",),
    )
    _, fate = to_dead_letter(event, "no")
    record = fate.record
    assert isinstance(record, Fate) and record.uids == ["g0-0"] and record.partition == 1
    assert (
        np.array_equal(record.offsets, [5])
        and record.policy_versions is not None
        and record.policy_versions.tolist() == [3]
    )


def test_of_a_record_that_is_larger_than_a_message_a_letter_keeps_the_head_and_the_hash():
    """Compressed, 20 MB of zeros are a few KB to a broker: as a letter they fit into no message,
    and their buffer would end at every start.
    """
    sent = Message(
        "rollouts.copy",
        b"k" * 1_000_000,
        bytes(20_000_000),
        (("schema", b"rollout/1"), ("long", b"x" * 500_000)),
        1,
        7,
    )
    message = letter_message(sent)
    assert message.value == bytes(HEAD_BYTES) and size_of(message) < HEAD_BYTES + 2_000
    letter = parse_dead_letter(message)
    assert letter is not None and not letter.is_whole and letter[:3] == ("rollouts.copy", 1, 7)
    assert letter.cause.endswith("; of its 20,000,000 bytes the first 65,536 are kept")
    assert (
        dict(message.headers)["streamrl.sha256"]
        == hashlib.sha256(bytes(20_000_000)).hexdigest().encode()
    )
    whole = parse_dead_letter(letter_message())
    assert whole is not None and whole.is_whole
