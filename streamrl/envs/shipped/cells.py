"""Takes the values of a row's columns: texts, answers, chat messages, and what is published.

A value is taken as what it is or refused with the name of its column. No structure becomes a text
by Python's spelling of it. Errors are texts that go after file and line.
"""

from __future__ import annotations

import datetime
import math
import re
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# The largest whole number up to which a float names one number only.
EXACT_FLOAT = 2**53
# The names that pandas has for a missing value, which is no float.
MISSING = ("NAType", "NaTType")
SPELLED_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content)['\"]\s*:")
TEXT_PARTS = ("text", "input_text")
SHOWN = 60  # characters of a value in an error


def value_of(cell: Any) -> Any:
    """A cell as a value of Python: numpy's scalars and arrays are converted, and None is what is
    missing in pandas.
    """
    if type(cell).__name__ in MISSING:
        return None
    if type(cell).__module__ == "numpy" and hasattr(cell, "tolist"):
        # 0.1 of single precision is 0.1, and not 0.10000000149011612.
        return float(str(cell)) if type(cell).__name__ in ("float16", "float32") else cell.tolist()
    return cell


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: None, or NaN as pandas has it in a column of texts."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def text_in(cell: Any, column: str) -> str:
    """The text of a cell. Raises ValueError for anything else, and for blanks."""
    value = value_of(cell)
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {shown(value)}, not a text")
    if not value.strip():
        raise ValueError(f"{column!r} is empty")
    return _encodable(value, column)


def answer_in_cell(cell: Any, column: str) -> str:
    """The text of a right answer: a text, or a number in its shortest spelling. Raises ValueError
    for what is none, such as a truth value, which the policy may write in several ways, or the
    "nan" of a table whose cell was missing.
    """
    value = value_of(cell)
    written = _scalar_text(value)
    if written is None or written.strip().casefold() in ("", "nan"):
        raise ValueError(f"{column!r} is {shown(value)}, not an answer")
    return _encodable(written, column)


def published(cell: Any, column: str) -> str | int | float | bool | None:
    """A cell as a record may have it. Whole numbers that no record has, dates and UUIDs are texts.
    Raises ValueError for a structure, for bytes, and for NaN.
    """
    value = value_of(cell)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{column!r} is {value}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    written = _scalar_text(value)
    if written is None:
        kind = type(value).__name__
        raise ValueError(f"{column!r} is {kind}; only texts and numbers can be kept")
    return _encodable(written, column)


def _scalar_text(value: Any) -> str | None:
    """The text of a value, or None if it has no spelling that everybody would give it."""
    match value:
        case str():
            return value
        case bool():
            return None
        case float() if not math.isfinite(value):
            return None
        case float() if value.is_integer() and abs(value) <= EXACT_FLOAT:
            return str(int(value))
        case int() | float() | uuid.UUID():
            return str(value)
        case Decimal() if value.is_finite():
            return format(value, "f")
        case datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return None


def _encodable(text: str, column: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column!r} has half of a surrogate pair, which is no text") from None
    return text


def prompt_messages(cell: Any, column: str) -> list[Message]:
    """The messages of a prompt: a text is the user's. Raises ValueError for what is no prompt, or
    if the assistant has the last word, since the policy would have to answer itself.
    """
    value = value_of(cell)
    if isinstance(value, str) and value.strip():
        if SPELLED_MESSAGES.match(value):
            raise ValueError(
                f"{column!r} is a text that spells messages: {shown(value)}; store the list itself,"
                " as JSON Lines or Parquet can"
            )
        return [{"role": "user", "content": _encodable(value, column)}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column!r} is neither a text nor a list of messages")
    messages = [chat_message(message, column) for message in value]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{column!r} ends with a message of the assistant; the policy answers a user or a tool"
        )
    return messages


def chat_message(cell: Any, column: str) -> Message:
    """A message as a chat completion has it. Parts of its content that are text are joined, and
    fields without a value, which Parquet adds, are left out. Raises ValueError for another shape.
    """
    if isinstance(cell, Mapping) and "from" in cell and "value" in cell:
        raise ValueError(
            f"{column!r} has messages with 'from' and 'value'; write them as 'role' and 'content'"
        )
    if not (isinstance(cell, Mapping) and isinstance(cell.get("role"), str)):
        raise ValueError(f"{column!r} has a message without role and content: {shown(cell)}")
    message = {name: value_of(value) for name, value in cell.items()}
    message = {name: value for name, value in message.items() if value is not None}
    role = message["role"]
    if role not in ROLES:
        raise ValueError(
            f"{column!r} has a message whose {shown(role)} is no role; there are {', '.join(ROLES)}"
        )
    message["content"] = _content(message.get("content"), message, column)
    try:
        msgspec.json.encode(message)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{column!r} has a message that cannot be sent to a server ({error})"
        ) from None
    return message


def _content(content: Any, message: Message, column: str) -> str:
    if content is None and message["role"] == "assistant":
        content = ""  # it may call tools, or be written without a content
    if isinstance(content, list):
        content = "".join(_part(part, column) for part in content)
    if content is None:
        raise ValueError(f"{column!r} has a message without role and content: {shown(message)}")
    if not isinstance(content, str):
        raise ValueError(f"{column!r} has a message whose content is no text: {shown(content)}")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{column!r} has an empty message of the user")
    return _encodable(content, column)


def _part(part: Any, column: str) -> str:
    """The text of a part of a message's content. Raises ValueError for an image and the like."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        part = {name: value for name, value in part.items() if value is not None}
    match part:
        case {"text": str(text)} if part.get("type", "text") in TEXT_PARTS and not (
            {*part} - {"type", "text"}
        ):
            return text
        case _:
            raise ValueError(
                f"{column!r} has a part that is no text: {shown(part)}; the policy reads text only"
            )


def shown(value: Any) -> str:
    """A value in an error, cut to a few characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
