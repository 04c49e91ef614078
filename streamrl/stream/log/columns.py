"""Messages as the columns of a Parquet file, and back. The column `value` is the record as it was
in the log.

Rollouts also have decoded columns, so that an ordinary query finds what it asks for. Nothing is
ever read back from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from streamrl.config import topology
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Message, TopicPartition
from streamrl.stream.records import Rollout

RAW = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", "UTC"), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
        pa.field("value", pa.binary()),  # null: a tombstone
    ]
)
# Decoded columns of rollouts. They are all null where a record cannot be read.
DECODED = pa.schema(
    [
        ("environment", pa.string()),
        ("problem_id", pa.string()),
        ("group_id", pa.string()),
        ("rollout_uid", pa.string()),
        ("producer", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("temperature", pa.float64()),
        ("policy_version", pa.int64()),
        ("newest_policy_version", pa.int64()),
        ("truncated", pa.bool_()),
        ("failure", pa.string()),
        ("sampled_tokens", pa.int64()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("message", pa.string())]))),
    ]
)


def arrow_schema(topic: str) -> pa.Schema:
    return pa.schema([*RAW, *DECODED]) if _is_decoded(topic) else RAW


def to_arrow(topic: str, messages: Sequence[Message]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        "offset": [m.offset for m in messages],
        "timestamp": [round(m.timestamp_s * 1000) for m in messages],
        "key": [m.key for m in messages],
        "headers": [
            [{"name": name, "value": value} for name, value in m.headers] for m in messages
        ],
        "value": [m.value for m in messages],
    }
    if _is_decoded(topic):
        rows = [_decoded(message) for message in messages]
        columns |= {name: [row.get(name) for row in rows] for name in DECODED.names}
    return pa.table(columns, schema=arrow_schema(topic))


def from_arrow(tp: TopicPartition, table: pa.Table) -> Iterator[Message]:
    """The messages again, from the columns of `RAW`."""
    columns = (table[name].to_pylist() for name in ("offset", "key", "headers", "value"))
    times_ms = table["timestamp"].cast(pa.int64()).to_pylist()
    for offset, key, headers, value, time_ms in zip(*columns, times_ms, strict=True):
        yield Message(
            topic=tp[0],
            key=key,
            value=value,
            headers=tuple((header["name"], header["value"]) for header in headers or ()),
            partition=tp[1],
            offset=offset,
            timestamp_s=(time_ms or 0) / 1000,
        )


def _is_decoded(topic: str) -> bool:
    return topology.kind_of(topic) == topology.ROLLOUTS


def _decoded(message: Message) -> dict[str, Any]:
    """The decoded columns of one message; empty where the record cannot be read."""
    rollout = to_event(message, ("rollout",)).record
    if not isinstance(rollout, Rollout):
        return {}
    computed: dict[str, Any] = {
        "rewards": list(rollout.rewards.items()),
        "messages": [{"role": turn.role, "message": turn.message} for turn in rollout.turns],
    }
    fields = {name: getattr(rollout, name) for name in DECODED.names if name not in computed}
    return {**fields, **computed}
