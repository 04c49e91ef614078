from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest

from streamrl.stream.log.codec import (
    ARRAY,
    DecodeError,
    decode,
    digest,
    encode,
    pack_array,
    to_event,
    to_message,
    unpack_array,
)
from streamrl.stream.log.protocol import Message, Output, Undecodable
from streamrl.stream.records import Record
from tests.support.build import rollout

GOOD = encode(rollout())


def claiming(shape: object, dtype: str = "<f4", data: bytes = b"") -> bytes:
    """A rollout whose logprobs array claims that shape."""
    turn = {
        "message": "",
        "role": "assistant",
        "tokens": msgpack.ExtType(ARRAY, pack_array(np.zeros(1, np.uint16))),
    }
    turn["logprobs"] = msgpack.ExtType(ARRAY, (msgpack.packb([dtype, shape]) or b"") + data)
    return msgpack.packb({**msgpack.unpackb(GOOD), "turns": [turn]}) or b""


def with_field(name: str, value: object) -> bytes:
    return msgpack.packb({**msgpack.unpackb(GOOD), name: value}) or b""


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "random bytes": (b"\xc1\x00\xff", "malformed"),
    "truncated": (GOOD[:-7], "truncated"),
    "trailing bytes": (GOOD + b"\x00", "trailing"),
    "not a map": (msgpack.packb([1, 2]) or b"", "Expected `object`"),
    "a field is missing": (msgpack.packb({"environment": "x"}) or b"", "missing required field"),
    "wrong type": (with_field("reward", "high"), r"Expected `float`, got `str` - at `\$.reward`"),
    "NaN reward": (with_field("reward", float("nan")), "not finite"),
    "10^12 elements claimed": (claiming([10**12]), r"claims shape \[1000000000000\]"),
    "negative shape": (claiming([-1]), "not a list of sizes"),
    "nested shape": (claiming([[1]]), "without \\[dtype, shape\\]"),
    "object dtype": (claiming([1], "|O", b"12345678"), "without \\[dtype, shape\\]"),
    "wrong dtype": (claiming([1], "<i4", b"1234"), "must be float32"),
    "lengths differ": (claiming([2], "<f4", b"12345678"), r"shape \[2\], expected \[1\]"),
    "NaN logprob": (claiming([1], "<f4", np.float32("nan").tobytes()), "not finite"),
    "array is no array": (
        with_field("turns", [{"message": "", "role": "", "tokens": [1, 2]}]),
        "Expected `numpy.ndarray`, got `list`",
    ),
    "array without a header": (
        with_field("turns", [{"message": "", "role": "", "tokens": msgpack.ExtType(ARRAY, b"")}]),
        "array without",
    ),
    "unknown extension": (
        with_field("turns", [{"message": "", "role": "", "tokens": msgpack.ExtType(9, b"x")}]),
        "extension type 9",
    ),
    "deep nesting": (
        b"\x81\xa8metadata" + b"\x81\xa1x" * 50_000 + b"\xc0",
        "nested too deeply|truncated|malformed",
    ),
    "no text": (with_field("environment", b"\xff\xfe"), "Expected `str`"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_record_says_why(name: str):
    data, says = BAD[name]
    with pytest.raises(DecodeError, match=says):
        decode("rollout/1", data)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("pickle/1", "'pickle' is unknown"),
        ("rollout", "no version"),
        ("rollout/0", "no version"),
        ("", "unknown"),
    ],
)
def test_an_unknown_schema_is_refused(schema: str, says: str):
    with pytest.raises(DecodeError, match=says):
        decode(schema, GOOD)


def test_arrays_of_objects_do_not_travel():
    with pytest.raises(ValueError, match="do not travel"):
        pack_array(np.array([object()]))


def test_an_array_comes_back_with_its_shape():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert unpack_array(memoryview(pack_array(array))).tolist() == array.tolist()


def test_big_endian_arrays_travel_little_endian():
    assert unpack_array(memoryview(pack_array(np.array([1, 2], ">i4")))).tolist() == [1, 2]


@pytest.mark.parametrize(
    "header", ["rollout/0", "rollout/", "rollout", "rollout/x", f"rollout/{'1' * 5000}"]
)
def test_a_header_without_a_version_says_so(header: str):
    with pytest.raises(DecodeError, match="has no version"):
        decode(header, GOOD)


def test_an_event_of_another_schema_is_undecodable_and_keeps_its_bytes():
    message = to_message(Output("rollouts.copy", "g0", rollout()))._replace(partition=0, offset=4)
    event = to_event(message, ("demand",))
    assert (
        isinstance(event.record, Undecodable)
        and "'rollout/1', expected demand" in event.record.cause
    )
    assert (event.record.value, event.record.headers, event.offset, event.key) == (
        message.value,
        message.headers,
        4,
        "g0",
    )
    assert isinstance(to_event(message, ("rollout",)).record, Record)


def test_a_tombstone_is_an_event_without_a_record():
    assert to_event(Message("servers", b"inference-0", None), ["server"]).record is None


def test_the_digest_tells_where_one_field_ends_and_the_next_begins():
    assert digest([Message("t", b"ab", b"c")]) != digest([Message("t", b"a", b"bc")])
    assert digest([Message("t", b"a", None)]) != digest([Message("t", b"a", b"")])


def test_a_record_is_a_map_that_any_language_reads():
    plain = msgspec.msgpack.decode(GOOD)
    assert plain["environment"] == "copy" and plain["turns"][1]["role"] == "assistant"
