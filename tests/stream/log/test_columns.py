from __future__ import annotations

import msgspec
import pyarrow as pa

from streamrl.stream.log.codec import encode, to_message
from streamrl.stream.log.columns import DECODED, RAW, from_arrow, to_arrow
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Rollout
from tests.support.build import rollout

TOPIC = "rollouts.copy"


def lying(record: Rollout, offset: int = 0) -> Message:
    return to_message(Output(TOPIC, record.group_id, record))._replace(
        partition=1, offset=offset, timestamp_s=1.5
    )


def test_messages_come_back_as_they_were():
    there = [
        lying(rollout()),
        Message(
            topic=TOPIC, key=None, value=None, headers=(), partition=1, offset=1, timestamp_s=2.0
        ),
        Message(
            topic=TOPIC,
            key=b"\xff",
            value=b"\xc1",
            headers=(("a", b""),),
            partition=1,
            offset=2,
            timestamp_s=0.001,
        ),
    ]
    assert list(from_arrow((TOPIC, 1), to_arrow(TOPIC, there))) == there


def test_rollouts_are_decoded_beside_their_bytes():
    good = rollout(reward=0.5, version=3)
    failed = rollout(sample=1, failure="timed out")
    first, second = to_arrow(TOPIC, [lying(good), lying(failed, 1)]).to_pylist()
    assert first["value"] == encode(good) and first["timestamp"].timestamp() == 1.5
    assert (first["environment"], first["problem_id"], first["rollout_uid"], first["reward"]) == (
        "copy",
        "g0",
        "g0-0",
        0.5,
    )
    assert (first["policy_version"], first["rewards"], first["sampled_tokens"]) == (
        3,
        [("exact", 0.5)],
        3,
    )
    assert first["messages"] == [
        {"role": "user", "message": "12="},
        {"role": "assistant", "message": "12"},
    ]
    assert (second["failure"], second["sampled_tokens"], second["messages"]) == ("timed out", 0, [])


def test_what_cannot_be_read_has_no_decoded_columns():
    for row in to_arrow(
        TOPIC, [Message(TOPIC, b"k", b"\xc1"), Message(TOPIC, b"k", None)]
    ).to_pylist():
        assert {row[name] for name in DECODED.names} == {None}


def test_other_topics_have_their_bytes_only():
    assert to_arrow("fates", []).schema == RAW
    assert to_arrow(TOPIC, []).schema == pa.schema([*RAW, *DECODED])


def test_every_decoded_column_is_a_field_or_made_of_some():
    fields = {field.name for field in msgspec.structs.fields(Rollout)}
    assert set(DECODED.names) - fields == {"sampled_tokens", "messages"}
