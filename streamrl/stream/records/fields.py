"""What records are made of: arrays, the columns that a record declares, and the checks of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
import numpy as np

from streamrl.stream.records.compact import THREE_BYTES

Array = np.ndarray

MAX_NAME = 1_000  # characters
# The name of a rollout, a group, an env, a part: it is the key or a field of other records, which
# would not fit into a message if a name could have any length.
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
# The number of a batch, which arrays have as int32.
BatchNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all records: immutable; fields at their default are not sent."""


def size_bound(record: Record) -> int:
    """Bytes that a record of arrays, names and numbers has at most when it is encoded."""
    size = 0
    for name in record.__struct_fields__:
        size += 64 + len(name)  # of the name, and of a number or of what precedes an array
        value = getattr(record, name)
        if isinstance(value, np.ndarray):
            size += value.nbytes
        elif isinstance(value, str | list):
            for text in [value] if isinstance(value, str) else value:
                size += 5 + 4 * len(text)  # a character has 4 bytes at most
    return size


class Column(NamedTuple):
    """Declares that an array of a record has one value for each group, sequence, token, span of
    sampled tokens, or sampled token.

    Tokens of prompts do not count. From the declaration follow the checks of lengths, how a group
    is scored (`buffer/groups.py`), selected from and joined to others (`batcher/assemble.py`), and
    laid out for the learner (`learner/model/examples.py`).
    """

    per: Literal["group", "sequence", "token", "span", "sampled"]
    dtype: str
    # the attribute of the Turn (by token or sampled token) or the Rollout (by sequence) that the
    # values come from; empty: they are computed
    source: str = ""
    # the value where there is none, or the column by sequence that has it
    fill: float | str = 0
    finite: bool = False  # its values have to be finite, and float32
    # `ids` and `logprobs`: they may be compact (`compact.py`)
    form: Literal["", "ids", "logprobs"] = ""
    ndim: int = 1  # dimensions of its array; with more than one a token has several values


@lru_cache
def columns_of(record: type[Record]) -> Mapping[str, Column]:
    """The columns that the fields of a record declare, by name."""
    hints = get_type_hints(record, include_extras=True)
    columns = dict[str, Column]()
    for name in record.__struct_fields__:
        for declared in getattr(hints[name], "__metadata__", ()):
            if isinstance(declared, Column):
                columns[name] = declared
    return columns


def check_columns(what: str, record: Record, counts: Mapping[str, int]) -> None:
    """Each column has as many values as `counts` has, of the kind that it declares. `what`: the
    record, for the message.
    """
    for name, column in columns_of(type(record)).items():
        array = getattr(record, name)
        if array is None:
            continue
        count = counts[column.per]
        if column.form == "ids":
            check_token_ids(f"{what}: {name}", array)
            if len(array) != count:
                raise misshapen(f"{what}: {name}", array, count)
        elif column.form == "logprobs":
            check_logprobs(f"{what}: {name}", array, count)
        elif column.finite:
            check_floats(f"{what}: {name}", array, count)
        elif column.ndim > 1:
            check_experts(f"{what}: {name}", array, count)
        elif array.ndim != 1 or len(array) != count:
            raise misshapen(f"{what}: {name}", array, count)
        elif array.dtype.kind != _kind(column.dtype):
            raise ValueError(f"{what}: {name} must be like {column.dtype}, not {array.dtype}")


@lru_cache
def _kind(dtype: str) -> str:
    """u, i or f: unsigned, signed, or real."""
    return np.dtype(dtype).kind


def check_token_ids(what: str, array: Array) -> None:
    """Raises ValueError unless these are unsigned integers in one dimension, or ids in three bytes
    each.
    """
    if array.ndim != 1 or (array.dtype.kind != "u" and array.dtype != THREE_BYTES):
        actual = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{what} must be one-dimensional and unsigned, not {actual}")


def total_of(what: str, lengths: Array) -> int:
    """The sum of lengths. Raises ValueError unless they are integers in one dimension, each from 0
    to 2**31 - 1, so that no sum of them wraps.
    """
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(f"{what} are {lengths.dtype}{list(lengths.shape)}, not a list of integers")
    if lengths.size and not 0 <= lengths.min() <= lengths.max() < 2**31:
        wrong = lengths[(lengths < 0) | (lengths >= 2**31)][0]
        raise ValueError(f"{what}: one is {wrong}, not 0 to {2**31 - 1}")
    return int(lengths.sum(dtype=np.int64))


def check_version(what: str, version: int) -> None:
    """A policy version travels as int32 in arrays. Raises ValueError."""
    if not 0 <= version < 2**31:
        raise ValueError(f"{what} is {version}, not 0 to {2**31 - 1}")


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest little-endian unsigned integer type that holds every id of a vocabulary of
    `vocab_size` tokens.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


MAX_DEPTH = 32  # of maps and lists in free-form fields


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Lists and maps at most `most` deep. Deeper ones would be readable or not by how much of
    the stack is in use, and a replay would differ.
    """
    if not value:
        return
    level = [value]
    for _ in range(most + 1):
        below = list[Any]()
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below
        if not level:
            return
    raise ValueError("nested too deeply")


def check_lengths(what: str, record: Record, names: Sequence[str], length: int) -> None:
    """Each of these arrays of the record is one-dimensional and of that length. `what`: the record,
    for the message.
    """
    for name in names:
        array = getattr(record, name)
        if array.ndim != 1 or len(array) != length:
            raise misshapen(f"{what}: {name}", array, length)


def misshapen(what: str, array: Array, length: int) -> ValueError:
    return ValueError(f"{what} has shape {list(array.shape)}, expected [{length}]")


def check_floats(what: str, array: Array, length: int | None) -> None:
    """float32, one-dimensional, finite, and of the length given."""
    if array.dtype != np.float32:
        raise ValueError(f"{what} must be float32, not {array.dtype}")
    if array.ndim != 1 or length not in (None, len(array)):
        raise misshapen(what, array, array.size if length is None else length)
    # the sum of squares is not finite where a value is not, and cheap
    if not (math.isfinite(np.vdot(array, array)) or np.isfinite(array).all()):
        raise ValueError(
            f"{what}: value {int(np.flatnonzero(~np.isfinite(array))[0])} is not finite"
        )


def check_logprobs(what: str, array: Array, length: int | None) -> None:
    """As `check_floats`, or compact: uint16, one-dimensional, and of the length given."""
    if array.dtype != np.uint16:
        check_floats(what, array, length)
    elif array.ndim != 1 or length not in (None, len(array)):
        raise misshapen(what, array, array.size if length is None else length)


MAX_EXPERTS = 4_096  # of a token, in all layers; the largest models have some 1,100


def check_experts(what: str, array: Array, length: int) -> None:
    """Experts of `length` tokens: (length, layers, k) uint8 or uint16, with at least one expert a
    token and at most MAX_EXPERTS. Tokens without experts get as many as the others.
    """
    if array.dtype.kind != "u" or array.itemsize > 2:
        raise ValueError(f"{what} must be uint8 or uint16, not {array.dtype}")
    if array.ndim != 3 or len(array) != length:
        raise ValueError(
            f"{what} has shape {list(array.shape)}, expected [{length}, layers, experts of a token]"
        )
    each = math.prod(array.shape[1:])
    if not 1 <= each <= MAX_EXPERTS:
        raise ValueError(f"{what} has {each} experts for each token, not 1 to {MAX_EXPERTS:,}")
