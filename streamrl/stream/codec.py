"""Records to bytes and back: one MessagePack map a record, arrays as extension type 1, schema name and version in a header.

An array is `Ext(1, dtype | shape | raw little-endian bytes)`: a MessagePack array [dtype, [dimensions]] followed directly by the data. Decoding
makes views into the message; nothing is copied. docs/records.md says it for other languages. No pickle, ever.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import xxhash

from streamrl.records import RECORDS, Record
from streamrl.stream.log import Event, Message, Output, Undecodable

SCHEMA_HEADER = "schema"
VERSION = 1
ARRAY = 1  # MessagePack extension type of arrays
DTYPES = ("<u2", "<u4", "<i4", "<i8", "<f4", "|u1")
MAX_RANK = 4

_NAMES = {record: name for name, record in RECORDS.items()}
_HEADERS = {name: ((SCHEMA_HEADER, f"{name}/{VERSION}".encode()),) for name in RECORDS}
_DTYPE_OF = {b"\x92\xa3" + name.encode(): np.dtype(name) for name in DTYPES}  # an array of two, the first of them a text of three
_SIZE_OF = {code: struct.Struct(form) for code, form in ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))}


class DecodeError(ValueError):
    """These bytes are not such a record; the message says what is wrong, and where in the record."""


def pack_array(array: np.ndarray) -> bytes:
    """The payload of the extension: [dtype, shape] in MessagePack, then the data."""
    dtype, head = _head(array.dtype, array.shape)
    return b"".join((head, np.ascontiguousarray(array, dtype).data))


@lru_cache(4096)
def _head(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, bytes]:
    """The type that such an array has on the wire, and what stands before its data."""
    wire = dtype.newbyteorder("<")
    if wire.str not in DTYPES:
        raise ValueError(f"arrays of {dtype} do not travel; use one of {', '.join(DTYPES)}")
    return wire, msgspec.msgpack.encode((wire.str, shape))


def unpack_array(data: memoryview) -> np.ndarray:
    """A read-only view of the data. Raises DecodeError when dtype, shape and length do not agree; allocates nothing on their word."""
    dtype = _DTYPE_OF.get(data[:5].tobytes())  # as far as the dtype every head has the same length
    if dtype is None:
        raise DecodeError(f"array without [dtype, shape] and a dtype of {', '.join(DTYPES)}")
    shape, start = list[int](), 6
    try:
        for _ in range(_rank(data[5])):
            size, start = data[start], start + 1
            if size >= 0x80:  # a larger size has its own code, and stands behind it
                size, start = _SIZE_OF[size].unpack_from(data, start)[0], start + _SIZE_OF[size].size
            shape.append(size)
    except (KeyError, IndexError, struct.error):
        raise DecodeError(f"array shape {data[5:20].tobytes()!r} is not a list of sizes") from None
    if (count := math.prod(shape)) * dtype.itemsize != len(data) - start:
        raise DecodeError(f"array claims shape {shape} of {dtype} ({count * dtype.itemsize} bytes) but carries {len(data) - start} bytes")
    flat = np.frombuffer(data, dtype, offset=start)
    return flat if len(shape) == 1 else flat.reshape(shape)


def _rank(code: int) -> int:
    """Dimensions, of the code of a short MessagePack array."""
    if not 0x90 <= code <= 0x90 + MAX_RANK:
        raise KeyError(code)
    return code - 0x90


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
