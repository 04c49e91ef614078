from __future__ import annotations

import msgpack
import numpy as np
import pytest

from streamrl.extensions.recordings import dead_letters
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.dead_letters import (
    array_faults,
    cause_pattern,
    fields,
    readable_cause,
    retry,
    summarize_causes,
)
from streamrl.stream.log.codec import encode, to_message
from streamrl.stream.log.dead_letters import PREFIX
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import Fenced
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS, announce, play, running, wait_until_heard
from tests.support.waiting import patience, until


def send(log: MemoryLog, *messages: Message) -> None:
    writer = log.producer()
    for message in messages:
        writer.send(message)


def ahead(group: str, version: int = 12) -> list[Message]:
    """A whole group from a version that nobody has announced: good, but too early."""
    return [
        to_message(Output("rollouts.copy", group, rollout("copy", group, i, version)))
        for i in range(2)
    ]


@pytest.fixture
def recording() -> MemoryLog:
    return with_letters()


def with_letters() -> MemoryLog:
    """A run with five records that were dead-lettered."""
    log = MemoryLog(TOPICS)
    send(log, Message("rollouts.copy", b"x", b"\xc1", (("schema", b"rollout/1"),)), *ahead("early"))
    send(
        log,
        Message("rollouts.add", b"x", b"\xc1", (("schema", b"demand/1"),)),
        Message("rollouts.add", b"x", None),
    )
    play(log)
    return log


def test_they_are_counted_by_topic_and_kind_of_cause(recording: MemoryLog):
    rows = summarize_causes(recording)
    assert {place: (row.letters, row.requeued) for place, row in rows.items()} == {
        ("rollouts.add", "schema header is …, expected rollout"): (1, 0),
        ("rollouts.add", "the record is empty"): (1, 0),
        ("rollouts.copy", next(cause for topic, cause in rows if "malformed" in cause)): (1, 0),
        ("rollouts.copy", "policy version … is further ahead than …, and is not announced"): (
            2,
            0,
        ),
    }
    row = rows["rollouts.copy", "policy version … is further ahead than …, and is not announced"]
    assert (str(row.first), str(row.last)) == ("rollouts.copy[0]@1", "rollouts.copy[0]@2")


def test_causes_of_one_kind():
    assert (
        cause_pattern("rollout 'g0-1': a reward is not finite")
        == cause_pattern("rollout 'it\"s': a reward is not finite")
        == "rollout …: a reward is not finite"
    )
    assert cause_pattern("temperature 1.5 of 3") == "temperature … of …"
    fixed = (
        "rollout: array with a dtype of '<f8', not of <u2, <u4, <i4, <i8, <f4, |u1: it isn't the"
        " policy's"
    )
    assert cause_pattern(fixed) == fixed.replace("'<f8'", "…")


def test_causes_in_the_words_of_other_languages():
    assert (
        readable_cause("rollout: Expected `numpy.ndarray`, got `array` - at `$.turns[...].tokens`")
        == "rollout: expected an array (extension type 1), got array, at turns[...].tokens"
    )
    assert (
        readable_cause("rollout: Object missing required field `producer`")
        == "rollout: the field producer is missing"
    )


def test_arrays_that_cannot_be_read_are_named_by_their_fields():
    wide = msgpack.ExtType(1, msgpack.packb(["<f8", [1]]) + bytes(8))
    long = msgpack.ExtType(1, msgpack.packb(["<u2", [9]]) + bytes(2))
    record = {
        "turns": [
            {"tokens": long},
            {
                "tokens": msgpack.ExtType(1, msgpack.packb(["<u2", [1]]) + bytes(2)),
                "logprobs": wide,
            },
        ]
    }
    assert list(array_faults(msgpack.packb(record))) == [
        "turns[0].tokens: array claims shape [9] of uint16 (18 bytes) but carries 2 bytes",
        "turns[1].logprobs: array with a dtype of '<f8', not of <u2, |V3, <u4, <i4, <i8, <f4, |u1",
    ]
    assert list(array_faults(b"\xc1")) == []


def test_put_back_after_the_reason_is_gone_it_is_trained_on_and_the_account_balances(
    recording: MemoryLog,
):
    with running(recording):
        for version in range(4, 13):
            announce(recording, version)
        wait_until_heard(recording)
        assert retry(
            recording, ["rollouts.copy"], lambda letter: "further ahead" in letter.cause
        ) == {"rollouts.copy": 2}
        wait_for_group(recording, "early")
    result = audit(recording, RUN)
    assert result.balanced and result.problems == []
    assert result.counts["copy", 12]["invalid"] == 2  # the old offsets keep their fate
    # the new ones have another
    assert result.counts["copy", 12]["in flight"] + result.counts["copy", 12]["batched"] == 2


def wait_for_group(log: MemoryLog, name: str) -> None:
    reader = log.reader({("groups.copy", 0): 0})
    until(
        lambda: any(message.key == name.encode() for message in reader.poll(100, 0.02)),
        otherwise=f"group {name}",
    )


def test_each_is_put_back_once_for_ever(recording: MemoryLog):
    end = end_offset(recording, "rollouts.copy", 0)
    assert retry(recording, ["rollouts.copy"], lambda letter: True) == {"rollouts.copy": 3}
    assert retry(recording, ["rollouts.copy"], lambda letter: True) == {}
    assert [(m.key, m.value) for m in read(recording, "rollouts.copy", 0, end)] == [
        (m.key, m.value) for m in read(recording, "rollouts.copy", 0, 0, 3)
    ]
    assert sum(row.requeued for row in summarize_causes(recording).values()) == 3


def test_a_letter_that_names_another_topic_is_none(recording: MemoryLog):
    """Whoever may write letters of an env's rollouts would write policy versions through the
    operator who puts them back.
    """
    forged = PolicyVersion(
        learner="lead", version=1_000_000, uri="s3://mine", size_bytes=1, sha256="0", time_s=1.0
    )
    message = to_message(Output("policy-versions", "lead", forged))
    errors = {
        "topic": b"policy-versions",
        "partition": b"0",
        "offset": b"0",
        "exception.message": b"too early",
    }
    headers = (*message.headers, *((PREFIX + name, value) for name, value in errors.items()))
    before = end_offset(recording, "policy-versions", 0)
    known = sum(row.letters for row in summarize_causes(recording).values())
    send(recording, message._replace(topic="dead-letters.rollouts.copy", headers=headers))
    assert sum(row.letters for row in summarize_causes(recording).values()) == known
    assert retry(recording, ["rollouts.copy"], lambda letter: "too early" in letter.cause) == {}
    assert end_offset(recording, "policy-versions", 0) == before


def test_what_is_refused_again_is_a_new_letter(recording: MemoryLog):
    retry(recording, ["rollouts.add"], lambda letter: letter.cause == "the record is empty")
    reader = recording.reader(
        {("dead-letters.rollouts.add", 0): end_offset(recording, "dead-letters.rollouts.add", 0)}
    )
    with running(recording):
        assert reader.poll(1, patience(30))
    row = summarize_causes(recording)["rollouts.add", "the record is empty"]
    assert (row.letters, row.requeued) == (2, 1) and row.last.offset > row.first.offset
    assert audit(recording, RUN).balanced


def test_a_retry_that_dies_half_way_is_finished_by_the_next(
    recording: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    class Dead(Exception): ...

    class Dying:
        """Dies in its second transaction."""

        def __init__(self) -> None:
            self.writer = real("dead-letters")
            self.left = 1

        def commit(self, messages: list[Message]) -> int:
            self.left -= 1
            if self.left < 0:
                raise Dead
            return self.writer.commit(messages)

        def close(self) -> None: ...

    real = recording.writer
    end = end_offset(recording, "rollouts.copy", 0)
    monkeypatch.setattr(dead_letters, "CHUNK_LETTERS", 1)
    monkeypatch.setattr(recording, "writer", lambda identity: Dying())
    with pytest.raises(Dead):
        retry(recording, ["rollouts.copy"], lambda letter: True)
    monkeypatch.setattr(recording, "writer", real)
    assert retry(recording, ["rollouts.copy"], lambda letter: True) == {"rollouts.copy": 2}
    assert [m.value for m in read(recording, "rollouts.copy", 0, end)] == [
        m.value for m in read(recording, "rollouts.copy", 0, 0, 3)
    ]


def test_of_two_at_the_same_time_one_is_fenced(recording: MemoryLog):
    def other_starts_meanwhile(letter: object) -> bool:
        recording.writer("dead-letters")
        return True

    end = end_offset(recording, "rollouts.copy", 0)
    with pytest.raises(Fenced):
        retry(recording, ["rollouts.copy"], other_starts_meanwhile)
    assert end_offset(recording, "rollouts.copy", 0) == end


def test_fields_as_far_as_they_go():
    good = encode(rollout())
    assert dict(fields(good))["group_id"] == "'g0'"
    cut = list(fields(good[:40]))
    assert (
        cut[0] == ("environment", "'copy'")
        and cut[-1][0] == ""
        and "cannot be read from byte" in cut[-1][1]
    )
    assert list(fields(b"\xc1"))[-1][1].startswith("cannot be read from byte 0 on")
    assert list(fields(b"\x81\xa1a\x01\x02")) == [("a", "1"), ("", "1 more bytes after the map")]
    assert "cannot be read" in list(fields(b"\x81\xa1a" + b"\x91" * 100_000))[-1][1]
    assert "cannot be read" in list(fields(b"\x81\xa1a\xdd\xff\xff\xff\xff"))[-1][1]
    array = msgpack.ExtType(1, msgpack.packb(["<f4", [9]]) + np.zeros(2, np.float32).tobytes())
    assert (
        "array that cannot be read: array claims shape [9]"
        in dict(fields(msgpack.packb({"a": array})))["a"]
    )
