"""Elements of MessagePack, counted without decoding them."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from streamrl.stream.log import codec
from streamrl.stream.log.codec import DecodeError, decode, encode
from streamrl.stream.log.elements import has_more_elements
from tests.support.build import rollout
from tests.test_records import examples


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (1, 0),
        ([], 0),
        ([1, -1, 200, -200, 2**40, -(2**40), 1.5, None, True, "a", b"b"], 11),
        ({"a": [1, {"b": 2}], "c": {}}, 4 + 2 + 2),
        (["x" * 40, "x" * 400, "x" * 70_000, b"x" * 400, b"x" * 70_000], 5),
        ([msgpack.ExtType(1, b"x" * size) for size in (1, 2, 4, 8, 16, 3, 300, 70_000)], 8),
        (list(range(20)), 20),
        ([[]] * 70_000, 70_000),
        ({number: [] for number in range(70_000)}, 140_000),
    ],
)
def test_the_elements_of_all_lists_and_maps_are_counted(value: Any, elements: int):
    data = msgpack.packb(value) or b""
    assert not has_more_elements(data, elements)
    assert elements == 0 or has_more_elements(data, elements - 1)


def test_what_a_list_claims_to_have_counts_and_what_is_cut_off_is_left_to_the_decoder():
    assert has_more_elements(b"\xdd\xff\xff\xff\xff", 1_000_000)
    assert not has_more_elements(b"\xdd\x00", 10)
    assert not has_more_elements(b"\xc1", 10)


@pytest.mark.parametrize("record", examples().values(), ids=examples())
def test_every_kind_of_record_is_counted_like_its_decoded_form(record: Any):
    data = encode(record)
    unpacked = msgpack.unpackb(data, strict_map_key=False)
    assert not has_more_elements(data, count(unpacked))
    assert has_more_elements(data, count(unpacked) - 1)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(count, value.values()))
    return len(value) + sum(map(count, value)) if isinstance(value, list) else 0


FIELDS = {
    "turns": {"turns": [{"message": "", "role": ""}] * 99},
    "version_spans": {
        "turns": [
            {
                "message": "",
                "role": "",
                "inference_metadata": {
                    "server": "",
                    "temperature": 1.0,
                    "version_spans": [[0, 0, 1]] * 99,
                },
            }
        ]
    },
    "rewards": {"rewards": {str(number): 1.0 for number in range(99)}},
    "rewards of a turn": {
        "turns": [{"message": "", "role": "", "rewards": {str(n): 1.0 for n in range(99)}}]
    },
    "metadata": {"metadata": {"x": [[]] * 40}},
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_of_more_elements_is_refused_before_it_is_decoded(
    field: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 60)
    monkeypatch.setattr(codec, "COUNTED_BYTES", 0)
    fields = msgpack.unpackb(encode(rollout()), strict_map_key=False)
    value = msgpack.packb({**fields, **FIELDS[field]}) or b""
    with pytest.raises(DecodeError, match="rollout: its lists and maps have more than 60 elements"):
        decode("rollout/1", value)
