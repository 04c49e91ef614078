"""Records to bytes and back: one MessagePack map a record, arrays as extension type 1, schema name
and version in a header.

An array is `Ext(1, dtype | shape | raw little-endian bytes)`: a MessagePack array [dtype,
[dimensions]] followed directly by the data. Decoding makes views into the message; nothing is
copied. docs/records.md says it for other languages. No pickle, ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import xxhash

from streamrl.log.chunks import INCOMPLETE, is_chunk
from streamrl.log.protocol import Event, Message, Output, Undecodable
from streamrl.records import RECORDS, Record

SCHEMA_HEADER = "schema"
VERSION = 1
ARRAY = 1  # MessagePack extension type of arrays
DTYPES = ("<u2", "<u4", "<i4", "<i8", "<f4", "|u1")
MAX_RANK = 4
METADATA_BYTES = 1 << 20  # of a rollout

_NAMES = {record: name for name, record in RECORDS.items()}
_HEADERS = {name: ((SCHEMA_HEADER, f"{name}/{VERSION}".encode()),) for name in RECORDS}
_HEAD = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
# of a size in a shape, by its first byte
_SIZE_BYTES = [{0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.get(code, 1) for code in range(256)]


class DecodeError(ValueError):
    """These bytes are not such a record; the message says what is wrong, and where in the record."""


def pack_array(array: np.ndarray) -> bytes:
    """The payload of the extension: [dtype, shape] in MessagePack, then the data."""
    dtype, head = _head(array.dtype, array.shape)
    return b"".join((head, np.ascontiguousarray(array, dtype)))  # pyright: ignore[reportArgumentType]: a buffer, but in Python 3.11 no stub can say so


@lru_cache(4096)
def _head(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, bytes]:
    """The type that such an array has on the wire, and what stands before its data."""
    wire = dtype.newbyteorder("<")
    if wire.str not in DTYPES:
        raise ValueError(f"arrays of {dtype} do not travel; use one of {', '.join(DTYPES)}")
    return wire, msgspec.msgpack.encode((wire.str, shape))


def unpack_array(data: memoryview) -> np.ndarray:
    """A read-only view of the data. Raises DecodeError when dtype, shape and length do not agree;
    allocates nothing on their word.
    """
    start = 6  # behind the dtype and the rank
    try:
        for _ in range(data[5] & 0x0F):
            start += _SIZE_BYTES[data[start]]
    except IndexError:
        pass  # the head ends too soon, and says so
    dtype, shape, size = _layout(data[:start].tobytes())
    if size != len(data) - start:
        raise DecodeError(
            f"array claims shape {list(shape)} of {dtype} ({size} bytes) but carries {len(data) - start} bytes"
        )
    return np.ndarray(shape, dtype, data, start)


@lru_cache(4096)
def _layout(head: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """(dtype, shape, bytes of data) of what stands before an array's data."""
    try:
        name, shape = _HEAD.decode(head)
    except msgspec.DecodeError:
        raise DecodeError(
            f"array without [dtype, shape] before its data but {head[:20]!r}"
        ) from None
    if name not in DTYPES:
        raise DecodeError(f"array with a dtype of {name[:20]!r}, not of {', '.join(DTYPES)}")
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise DecodeError(f"array shape {list(shape)} is not a list of sizes, {MAX_RANK} at most")
    return np.dtype(name), shape, math.prod(shape) * np.dtype(name).itemsize


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


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_DECODERS = {
    name: msgspec.msgpack.Decoder(record, ext_hook=_decode_ext) for name, record in RECORDS.items()
}


class _Free(msgspec.Struct):
    """Of a record only its free-form field, as it stands in the bytes."""

    metadata: msgspec.Raw = msgspec.Raw(b"\x80")


_FREE = msgspec.msgpack.Decoder(_Free)


def _refuse_large_metadata(name: str, value: bytes) -> None:
    """Raises DecodeError for metadata that is not to be decoded: 8 MB of empty lists would be half
    a gigabyte of objects.
    """
    if name != "rollout" or len(value) <= METADATA_BYTES:
        return
    try:
        size = len(_FREE.decode(value).metadata)
    except RecursionError:
        # how deep it may be depends on the stack, so the words are the same
        size = METADATA_BYTES + 1
    if size > METADATA_BYTES:
        raise DecodeError(
            f"{name}: metadata has more than {METADATA_BYTES:,} bytes, or is nested too deeply to be measured"
        )


def encode(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decode(schema: bytes | str, value: bytes) -> Record:
    """Bytes of the named schema to a record. Raises DecodeError."""
    name = _name_of(schema)
    try:
        _refuse_large_metadata(name, value)
        return _DECODERS[name].decode(value)
    except DecodeError:
        raise
    except RecursionError:
        raise DecodeError(f"{name}: nested too deeply") from None
    except (ValueError, UnicodeDecodeError, msgspec.DecodeError) as error:
        # ValidationError is one of them
        # the same words, whether the stack or `check_depth` found it
        if "nested too deeply" in str(error):
            raise DecodeError(f"{name}: nested too deeply") from None
        raise DecodeError(f"{name}: {error}") from None


@lru_cache(256)
def _name_of(schema: bytes | str) -> str:
    """The record that a schema header names. Raises DecodeError."""
    name, _, version = (
        schema.decode("utf-8", "replace") if isinstance(schema, bytes) else schema
    ).partition("/")
    if name not in RECORDS:
        raise DecodeError(f"schema {name[:60]!r} is unknown; expected one of {', '.join(RECORDS)}")
    if not (version.isdecimal() and len(version) < 10 and int(version) > 0):
        raise DecodeError(f"schema header {name}/{version[:20]} has no version")
    if int(version) > VERSION:
        raise DecodeError(
            f"schema {name}/{version} is newer than {name}/{VERSION}, which is what this streamrl reads; upgrade its reader"
        )
    return name


@lru_cache(256)
def _is_one_of(schema: bytes, names: tuple[str, ...]) -> bool:
    return any(schema.startswith(name.encode() + b"/") for name in names)


def to_message(output: Output) -> Message:
    key = output.key.encode("utf-8", "surrogateescape")
    if output.record is None:
        return Message(output.topic, key, None)
    if isinstance(output.record, Undecodable):
        return Message(output.topic, key, output.record.value, output.record.headers)
    return Message(output.topic, key, encode(output.record), _HEADERS[_NAMES[type(output.record)]])


def to_event(message: Message, schemas: tuple[str, ...]) -> Event:
    """Decode a message that should be one of `schemas`; what cannot be read becomes `Undecodable`,
    with the cause.
    """
    # a key of any bytes comes out as it went in
    key = (message.key or b"").decode("utf-8", "surrogateescape")
    if message.value is None:
        return Event(
            message.topic, message.partition, message.offset, key, None, None, message.headers
        )
    schema = dict(message.headers).get(SCHEMA_HEADER, b"")
    try:
        if is_chunk(message):
            raise DecodeError(INCOMPLETE)
        if not _is_one_of(schema[:60], schemas):  # what is remembered is short
            raise DecodeError(
                f"schema header is {schema[:60].decode('utf-8', 'replace')!r}, expected {' or '.join(schemas)}"
            )
        record: Record | Undecodable = decode(schema, message.value)
    except DecodeError as error:
        record = Undecodable(str(error), message.value, message.headers)
    return Event(
        message.topic,
        message.partition,
        message.offset,
        key,
        record,
        message.value,
        message.headers,
    )


def digest(messages: Iterable[Message]) -> bytes:
    """XXH3-128 over topic, key and value of each message, lengths included so that ("ab","c") is
    not ("a","bc").
    """
    state = xxhash.xxh3_128()
    for message in messages:
        key, value = message.key or b"", message.value
        state.update(
            b"%s %d %d " % (message.topic.encode(), len(key), -1 if value is None else len(value))
        )
        state.update(key)
        state.update(value or b"")
    return state.digest()
