"""Whole topics: every partition, one kind of record, nothing that cannot be read."""

from __future__ import annotations

import pytest

from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.log.records_of import follow_records, messages_of, read_records, records_of
from streamrl.stream.records import Metric, Server


def server(version: int) -> Server:
    return Server(server_id=f"s{version}", url="http://127.0.0.1", version=version)


def test_the_records_of_all_partitions_that_are_of_one_kind_and_can_be_read():
    log = MemoryLog({"servers": 2, "empty": 1})
    metric = Metric(source="a", time_s=1.0, values={"a/b": 1.0})
    unreadable = Message("servers", b"k", b"\xc1", (("schema", b"server/1"),))
    written = [
        to_message(Output("servers", "a", server(1)))._replace(partition=1),
        to_message(Output("servers", "a", metric))._replace(partition=0),
        unreadable._replace(partition=0),
        to_message(Output("servers", "b", server(2)))._replace(partition=0),
    ]
    log.append(written, marker=True)
    log.append([to_message(Output("servers", "c", server(3)))._replace(partition=1)], marker=False)
    found = records_of(log, "servers", Server)
    assert [(record.version, message.partition) for record, message in found] == [
        (2, 0),
        (1, 1),
        (3, 1),
    ]
    assert len(list(messages_of(log, "servers"))) == 5
    assert list(messages_of(log, "empty")) == list(messages_of(log, "nowhere")) == []


def test_what_retention_has_deleted_is_not_asked_for():
    log = MemoryLog({"servers": 1})
    log.append([to_message(Output("servers", "a", server(i))) for i in range(3)], marker=False)
    log.delete_before({("servers", 0): 2})
    assert [record.version for record, _ in records_of(log, "servers", Server)] == [2]


def test_one_partition_is_read_from_an_offset_on_and_followed(caplog: pytest.LogCaptureFixture):
    log = MemoryLog({"servers": 1})
    written = [to_message(Output("servers", "a", server(i))) for i in range(3)]
    written[1] = written[1]._replace(value=b"\xc1")
    log.append(written, marker=False)
    log.delete_before({("servers", 0): 1})
    found = list(read_records(log, ("servers", 0), Server))
    assert [(record.version, offset) for record, offset in found] == [(2, 2)]
    assert "servers@1 is skipped, because it cannot be read" in caplog.text
    coming = follow_records(log, ("servers", 0), Server, 2)
    assert next(coming) == found[0] and next(coming) is None
    log.append([to_message(Output("servers", "a", server(3)))], marker=False)
    later = next(coming)
    assert later is not None and (later[0].version, later[1]) == (3, 3)
