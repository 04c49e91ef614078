"""Records to bytes and back. A record is one MessagePack map, its arrays are extension type 1, and
a header of the message names its schema and version.

An array is `Ext(1, dtype | shape | raw little-endian bytes)`: a MessagePack array [dtype,
[dimensions]] followed directly by the data. Decoding makes views of the message and copies nothing.
docs/records.md describes the format for other languages. There is no pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from streamrl.stream.log.chunks import INCOMPLETE, is_chunk
from streamrl.stream.log.elements import has_more_elements
from streamrl.stream.log.protocol import Event, Message, Output, Undecodable, is_unreadable
from streamrl.stream.records import RECORDS, Record

P = TypeVar("P", bound=msgspec.Struct)

SCHEMA_HEADER = "schema"
VERSION = 1
ARRAY = 1  # MessagePack extension type of arrays
DTYPES = ("<u2", "|V3", "<u4", "<i4", "<i8", "<f4", "|u1")
MAX_RANK = 4
METADATA_BYTES = 1 << 20  # the most that a rollout's metadata may have
# The elements of all lists and maps of a record, which are 50 MB of objects, are limited where a
# record is large enough for more of them than do harm.
MAX_ELEMENTS = 500_000
COUNTED_BYTES = 1 << 20

_NAMES = {record: name for name, record in RECORDS.items()}
_HEADERS = {name: ((SCHEMA_HEADER, f"{name}/{VERSION}".encode()),) for name in RECORDS}
_HEAD = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
# Bytes that MessagePack takes for a size in a shape, by the first of them.
_SIZE_BYTES = [{0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.get(code, 1) for code in range(256)]


class DecodeError(ValueError):
    """These bytes are not such a record. The message has what is wrong, and where."""


def pack_array(array: np.ndarray) -> bytes:
    """The payload of the extension: [dtype, shape] in MessagePack, then the data."""
    dtype, head = _head(array.dtype, array.shape)
    data: Any = np.ascontiguousarray(array, dtype)  # a buffer, which stubs of 3.11 lack
    return b"".join((head, data))


@lru_cache(4096)
def _head(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, bytes]:
    """The dtype of such an array on the wire, and the bytes before its data."""
    wire = dtype.newbyteorder("<")
    if wire.str not in DTYPES:
        raise ValueError(f"arrays of {dtype} do not travel; use one of {', '.join(DTYPES)}")
    return wire, msgspec.msgpack.encode((wire.str, shape))


def unpack_array(data: memoryview) -> np.ndarray:
    """A read-only view of the data. Raises DecodeError when dtype, shape and length do not agree,
    and allocates no memory because of what they claim.
    """
    start = 6  # dtype and rank come first
    try:
        for _ in range(data[5] & 0x0F):
            start += _SIZE_BYTES[data[start]]
    except IndexError:
        pass  # the head ends too soon, and decoding it raises
    dtype, shape, size = _layout(data[:start].tobytes())
    if size != len(data) - start:
        raise DecodeError(
            f"array claims shape {list(shape)} of {dtype} ({size} bytes) "
            f"but carries {len(data) - start} bytes"
        )
    return np.ndarray(shape, dtype, data, start)


@lru_cache(4096)
def _layout(head: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """The dtype, the shape and the size of the data, from the bytes before it."""
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


class _Metadata(msgspec.Struct):
    """The free-form field of a rollout, undecoded. All other fields are skipped."""

    metadata: msgspec.Raw = msgspec.Raw(b"\x80")


_METADATA_DECODER = msgspec.msgpack.Decoder(_Metadata)


def _refuse_large_metadata(name: str, value: bytes) -> None:
    """Raise DecodeError for metadata that is too large to be decoded: 8 MB of empty lists would
    become half a gigabyte of objects.
    """
    if name != "rollout" or len(value) <= METADATA_BYTES:
        return
    try:
        size = len(_METADATA_DECODER.decode(value).metadata)
    except RecursionError:
        # How deep metadata may be nested depends on the stack, so both causes have the same words.
        size = METADATA_BYTES + 1
    if size > METADATA_BYTES:
        raise DecodeError(
            f"{name}: metadata has more than {METADATA_BYTES:,} bytes, "
            "or is nested too deeply to be measured"
        )


def encode(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decode(schema: bytes | str, value: bytes) -> Record:
    """Decode bytes of the named schema. Raises DecodeError."""
    name = _name_of(schema)
    try:
        _refuse_large_metadata(name, value)
        if len(value) > COUNTED_BYTES and has_more_elements(value, MAX_ELEMENTS):
            raise DecodeError(
                f"{name}: its lists and maps have more than {MAX_ELEMENTS:,} elements"
            )
        return _DECODERS[name].decode(value)
    except DecodeError:
        raise
    except RecursionError:
        raise DecodeError(f"{name}: nested too deeply") from None
    except (ValueError, OverflowError, msgspec.DecodeError) as error:
        # A ValidationError of msgspec is a DecodeError. The words are the same, whether the stack
        # or `check_depth` found the nesting too deep.
        if "nested too deeply" in str(error):
            raise DecodeError(f"{name}: nested too deeply") from None
        raise DecodeError(f"{name}: {error}") from None


@lru_cache(256)
def _name_of(schema: bytes | str) -> str:
    """The record that a schema header names. Raises DecodeError."""
    text = schema.decode("utf-8", "replace") if isinstance(schema, bytes) else schema
    name, _, version = text.partition("/")
    if name not in RECORDS:
        raise DecodeError(f"schema {name[:60]!r} is unknown; expected one of {', '.join(RECORDS)}")
    if not (version.isdecimal() and len(version) < 10 and int(version) > 0):
        raise DecodeError(f"schema header {name}/{version[:20]} has no version")
    if int(version) > VERSION:
        raise DecodeError(
            f"schema {name}/{version} is newer than {name}/{VERSION}, "
            "which is what this streamrl reads; upgrade its reader"
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
    """Decode a message that should be one of `schemas`. One that cannot be read becomes
    `Undecodable`, with the cause.
    """
    # A key of any bytes comes out as it went in.
    key = (message.key or b"").decode("utf-8", "surrogateescape")
    record: Record | Undecodable | None = None
    if message.value is not None:
        try:
            record = _decode_message(message, message.value, schemas)
        except DecodeError as error:
            record = Undecodable(str(error), message.value, message.headers)
    return Event(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=key,
        record=record,
        value=message.value,
        headers=message.headers,
    )


def decode_part(message: Message, schemas: tuple[str, ...], part: type[P]) -> P:
    """Some fields of the record of a message that should be one of `schemas`: those of `part`.
    Nothing is checked but their types. Raises DecodeError.
    """
    _check_schema(message, schemas)
    try:
        return _part_decoder(part).decode(message.value or b"")
    except (ValueError, OverflowError, RecursionError, msgspec.DecodeError) as error:
        raise DecodeError(f"{part.__name__}: {error}") from None


@lru_cache
def _part_decoder(part: type[P]) -> msgspec.msgpack.Decoder[P]:
    return msgspec.msgpack.Decoder(part, ext_hook=_decode_ext)


def _decode_message(message: Message, value: bytes, schemas: tuple[str, ...]) -> Record:
    return decode(_check_schema(message, schemas), value)


def _check_schema(message: Message, schemas: tuple[str, ...]) -> bytes:
    """The schema header of a message. Raises DecodeError if it is none of `schemas`."""
    if is_chunk(message):
        raise DecodeError(INCOMPLETE)
    if is_unreadable(message):
        raise DecodeError(message.headers[0][1].decode("utf-8", "replace"))
    schema = dict(message.headers).get(SCHEMA_HEADER, b"")
    head = schema[:60]  # short, because the cache below remembers it
    if not _is_one_of(head, schemas):
        text = head.decode("utf-8", "replace")
        raise DecodeError(f"schema header is {text!r}, expected {' or '.join(schemas)}")
    return schema


def digest(messages: Iterable[Message]) -> bytes:
    """XXH3-128 over topic, key and value of each message. Their lengths are included, so that
    ("ab", "c") differs from ("a", "bc").
    """
    state = xxhash.xxh3_128()
    for message in messages:
        key = message.key or b""
        value = message.value or b""
        value_length = -1 if message.value is None else len(value)
        state.update(b"%s %d %d " % (message.topic.encode(), len(key), value_length))
        state.update(key)
        state.update(value)
    return state.digest()
