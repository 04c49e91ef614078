"""The fields of every record as tables, from the classes and comments of
`streamrl/stream/records/`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from docs.hooks import settings
from streamrl.stream.records import RECORDS, Column, Record

HEAD = "| field | type | default | meaning |\n|---|---|---|---|"


def tables() -> str:
    """A section for each record, and after each those that it holds, in the order of travel."""
    seen = set[type]()
    found = list[str]()
    for title, record in RECORDS.items():
        for name, cls in [(title, record), *inner(record)]:
            if cls not in seen:
                seen.add(cls)
                found.append(section(name, cls))
    return "\n".join(found)


def inner(record: type[Record]) -> Iterator[tuple[str, type[Record]]]:
    """The records that are fields of this one, and theirs, each with its name."""
    for hint in get_type_hints(record).values():
        for cls in (hint, *get_args(hint)):
            if isinstance(cls, type) and issubclass(cls, Record):
                yield cls.__name__, cls
                yield from inner(cls)


def section(name: str, record: type[Record]) -> str:
    """Heading, docstring and table of a record."""
    hints = get_type_hints(record, include_extras=True)
    meanings = settings.comments(record)
    rows = [
        f"| `{field.name}` | {type_of(hints[field.name])} | {default_of(field)} |"
        f" {settings.escaped(meanings.get(field.name, ''))} |"
        for field in msgspec.structs.fields(record)
    ]
    about = settings.escaped(inspect.cleandoc(record.__doc__ or ""))
    return "\n".join([f"### {name}", "", about, "", HEAD, *rows, ""])


def type_of(hint: Any) -> str:
    """In words: `int`, a list of `Turn`, an array of `<f4` by token."""
    if hint is np.ndarray:
        return "array"
    if get_origin(hint) is Annotated:
        for column in hint.__metadata__:
            if isinstance(column, Column):
                kind = column.form or f"`{column.dtype.replace('|', '')}`"
                return f"{kind} by {'sampled token' if column.per == 'sampled' else column.per}"
        return type_of(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return settings.named(hint)
    inside = [type_of(part) for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is dict:
        return f"map of {inside[1]}"
    if get_origin(hint) in (list, tuple):
        return f"list of {', '.join(inside)}"
    return " or ".join(inside) or settings.named(hint)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """What a reader takes where the field was not sent. Empty: nothing, or an empty text."""
    if field.required:
        return "required"
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return "" if default in (None, "") else f"`{default}`"
