"""What the log in memory has beside what every log promises (test_contract.py)."""

from __future__ import annotations

import pytest

from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, beginning_offset, end_offset
from streamrl.stream.log.reading import read
from streamrl.system.errors import InputGone


def message(value: bytes) -> Message:
    return Message("out", b"k", value)


def test_a_transaction_leaves_a_marker_and_a_plain_message_none():
    log = MemoryLog({"out": 1})
    log.producer().send(message(b"1"))
    log.writer("a").commit([message(b"2"), message(b"3")])
    log.producer().send(message(b"4"))
    assert [m.offset for m in read(log, "out", 0, 0)] == [0, 1, 2, 4]
    assert end_offset(log, "out", 0) == 5


def test_what_retention_has_deleted_is_gone_and_the_rest_keeps_its_offsets():
    log = MemoryLog({"out": 1})
    for value in (b"0", b"1", b"2"):
        log.producer().send(message(value))
    log.delete_before({("out", 0): 2})
    assert (beginning_offset(log, "out", 0), end_offset(log, "out", 0)) == (2, 3)
    assert [m.value for m in read(log, "out", 0, 2)] == [b"2"]
    with pytest.raises(InputGone, match="has no offset 1; it begins at 2 and ends at 3"):
        log.reader({("out", 0): 1}).poll(1, 0.0)
    log.producer().send(message(b"3"))
    assert end_offset(log, "out", 0) == 4
