"""Records to bytes and back: one MessagePack map a record, arrays as extension type 1, schema name and version in a header.

An array is `Ext(1, dtype | shape | raw little-endian bytes)`: a MessagePack array [dtype, [dimensions]] followed directly by the data. Decoding
makes views into the message; nothing is copied. docs/records.md says it for other languages. No pickle, ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgpack
import msgspec
import numpy as np
import xxhash

from streamrl.records import RECORDS, Record
from streamrl.stream.log import Event, Message, Output, Undecodable

SCHEMA_HEADER = "schema"
VERSION = 1
ARRAY = 1  # MessagePack extension type of arrays
HEAD_BYTES = 64  # more than [dtype, shape] can take
DTYPES = ("<u2", "<u4", "<i4", "<i8", "<f4", "|u1")

_NAMES = {record: name for name, record in RECORDS.items()}
_HEADERS = {name: ((SCHEMA_HEADER, f"{name}/{VERSION}".encode()),) for name in RECORDS}
_ARRAY_HEADS: dict[tuple[str, int], bytes] = {}


class DecodeError(ValueError):
    """These bytes are not such a record; the message says what is wrong, and where in the record."""


def pack_array(array: np.ndarray) -> bytes:
    """The payload of the extension: [dtype, shape] in MessagePack, then the data."""
    dtype = array.dtype.newbyteorder("<").str
    if dtype not in DTYPES:
        raise ValueError(f"arrays of {array.dtype} do not travel; use one of {', '.join(DTYPES)}")
    head = msgpack.packb([dtype, list(array.shape)])
    assert head is not None
    return head + np.ascontiguousarray(array, dtype).tobytes()


def unpack_array(data: memoryview) -> np.ndarray:
    """A read-only view of the data. Raises DecodeError when dtype, shape and length do not agree; allocates nothing on their word."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEAD_BYTES, max_array_len=4, max_str_len=8)
    unpacker.feed(data[:HEAD_BYTES])
    try:
        head = unpacker.unpack()
    except Exception as error:
        raise DecodeError(f"array without [dtype, shape]: {error}") from None
    start = unpacker.tell()
    if not (isinstance(head, list) and len(head) == 2 and head[0] in DTYPES and isinstance(head[1], list)):
        raise DecodeError(f"array header {head!r} is not [dtype, shape] with a dtype of {', '.join(DTYPES)}")
    dtype, shape = np.dtype(head[0]), head[1]
    if not all(isinstance(d, int) and d >= 0 for d in shape):
        raise DecodeError(f"array shape {shape!r} is not a list of sizes")
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise DecodeError(f"array claims shape {shape} of {dtype} ({math.prod(shape) * dtype.itemsize} bytes) but carries {len(data) - start} bytes")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(ARRAY, pack_array(value))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_ext(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise DecodeError(f"extension type {code} is unknown")
    return unpack_array(data)


def _decode_hook(wanted: type, value: Any) -> Any:
    if wanted is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise DecodeError(f"expected an array, got {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_DECODERS = {name: msgspec.msgpack.Decoder(record, dec_hook=_decode_hook, ext_hook=_decode_ext) for name, record in RECORDS.items()}


def encode(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decode(schema: bytes | str, value: bytes) -> Record:
    """Bytes of the named schema to a record. Raises DecodeError."""
    name, _, version = (schema.decode("utf-8", "replace") if isinstance(schema, bytes) else schema).partition("/")
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise DecodeError(f"schema {name[:60]!r} is unknown; expected one of {', '.join(RECORDS)}")
    if not version.isdecimal() or int(version) < 1:
        raise DecodeError(f"schema header {name}/{version[:20]} has no version")
    try:
        return decoder.decode(value)
    except RecursionError:
        raise DecodeError(f"{name}: nested too deeply") from None
    except (ValueError, UnicodeDecodeError, msgspec.DecodeError) as error:  # ValidationError is one of them
        if "nested too deeply" in str(error):  # the same words, whether the stack or `check_depth` found it
            raise DecodeError(f"{name}: nested too deeply") from None
        raise DecodeError(f"{name}: {error}") from None


def to_message(output: Output) -> Message:
    key = output.key.encode("utf-8", "surrogateescape")
    if output.record is None:
        return Message(output.topic, key, None)
    if isinstance(output.record, Undecodable):
        return Message(output.topic, key, output.record.value, output.record.headers)
    return Message(output.topic, key, encode(output.record), _HEADERS[_NAMES[type(output.record)]])


def to_event(message: Message, schemas: Iterable[str]) -> Event:
    """Decode a message that should be one of `schemas`; what cannot be read becomes `Undecodable`, with the cause."""
    key = (message.key or b"").decode("utf-8", "surrogateescape")  # a key of any bytes comes out as it went in
    if message.value is None:
        return Event(message.topic, message.partition, message.offset, key, None, None, message.headers)
    schema = dict(message.headers).get(SCHEMA_HEADER, b"")
    try:
        if not any(schema.startswith(s.encode() + b"/") for s in schemas):
            raise DecodeError(f"schema header is {schema[:60].decode('utf-8', 'replace')!r}, expected {' or '.join(schemas)}")
        record: Record | Undecodable = decode(schema, message.value)
    except DecodeError as error:
        record = Undecodable(str(error), message.value, message.headers)
    return Event(message.topic, message.partition, message.offset, key, record, message.value, message.headers)


def digest(messages: Iterable[Message]) -> bytes:
    """XXH3-128 over topic, key and value of each message, lengths included so that ("ab","c") is not ("a","bc")."""
    state = xxhash.xxh3_128()
    for message in messages:
        key, value = message.key or b"", message.value
        state.update(b"%s %d %d " % (message.topic.encode(), len(key), -1 if value is None else len(value)))
        state.update(key)
        state.update(value or b"")
    return state.digest()
