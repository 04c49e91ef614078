"""Reads problems from files, JSON Lines or Parquet: a prompt or its token ids, and the right
answer. Lines that cannot be used are named.

A sample (docs/design/grpo.md) has `prompt`, which is a text or a list of chat messages, or
`input_token_ids`, which is the exact prompt in the vocabulary of the policy. If it has both, the
ids count and the text is for people. Its right answer is `gt_answer`. Other columns may be kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
NAMED = 5  # How many further lines that cannot be used an error names.
LARGEST_TOKEN = 2**32


class Columns(NamedTuple):
    """The names of the columns of a file."""

    prompt: str = "prompt"
    tokens: str = "input_token_ids"
    answer: str = "gt_answer"
    keep: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One problem of a file."""

    line: int  # from 1; the row of a Parquet file
    messages: list[dict[str, Any]]
    tokens: list[int]  # if empty, the server's chat template makes them of the messages
    answer: str
    kept: dict[str, Any]


def read(path: Path, columns: Columns, needs_answer: bool = True) -> list[Sample]:
    """All samples of a file, in order. Raises ValueError, which names the file or the lines that
    cannot be used.
    """
    samples: list[Sample] = []
    bad: list[tuple[int, str]] = []
    for line, row in rows(path):
        try:
            samples.append(sample(line, row, columns, needs_answer))
        except ValueError as error:
            bad.append((line, str(error)))
    if bad:
        raise ValueError(unusable(path, bad))
    if not samples:
        raise ValueError(f"file {path} has no problems")
    return samples


def unusable(path: Path, bad: Sequence[tuple[int, str]]) -> str:
    """The error for lines that cannot be used: what is wrong with the first, and which others."""
    line, cause = bad[0]
    text = f"{path}:{line}: {cause}"
    others = [str(other) for other, _ in bad[1 : NAMED + 1]]
    if others:
        lines = "line" if len(others) == 1 else "lines"
        text += f"; {lines} {', '.join(others)} neither"
    if len(bad) > NAMED:
        text += f" ({len(bad)} in all)"
    return text


def parsed(path: Path, what: str, parse: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """The lines of a JSON Lines file: (line number, what `parse` makes of it). Raises ValueError,
    which names the file or the line and says `what` a line should be.
    """
    try:
        for line, data in json_lines(path):
            try:
                if isinstance(data, ValueError):
                    raise data
                item = parse(data)
            except (ValueError, KeyError, TypeError) as error:
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"{path}:{line}: not {what} ({cause})") from None
            yield line, item
    except OSError as error:
        raise ValueError(f"file {path} cannot be read ({error.strerror})") from None


def rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file, which is read by its ending: (line number, row). A line that is not JSON
    is given as the error. Raises ValueError for a file of another ending.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in (".jsonl", ".ndjson", ".json"):
            yield from json_lines(path)
        else:
            raise ValueError(f"file {path}: name it .jsonl or .parquet, by what is in it")
    except OSError as error:
        raise ValueError(f"file {path} cannot be read ({error.strerror or error})") from None


def sample(line: int, row: Any, columns: Columns, needs_answer: bool) -> Sample:
    """The problem of a row. Raises ValueError if it is none; the text goes after file and line."""
    if isinstance(row, Exception):
        raise ValueError(f"not JSON ({row})")
    if not isinstance(row, Mapping):
        raise ValueError(f"not a map of columns but {type(row).__name__}")
    has = f"it has {', '.join(map(str, row))}"
    for name in columns.keep:
        if name not in row:
            raise ValueError(f"no {name!r} to keep; {has}")
    tokens = _tokens(row.get(columns.tokens))
    messages = _messages(row.get(columns.prompt), columns.prompt)
    if not (tokens or messages):
        raise ValueError(f"neither {columns.prompt!r} nor {columns.tokens!r}; {has}")
    answer = row.get(columns.answer)
    if needs_answer and answer is None:
        raise ValueError(f"no {columns.answer!r}; {has}")
    if needs_answer and not (isinstance(answer, str | int | float) and str(answer).strip()):
        raise ValueError(f"{columns.answer!r} is {answer!r}, not an answer")
    return Sample(
        line=line,
        messages=messages,
        tokens=tokens,
        answer="" if answer is None else str(answer),
        kept={name: _plain(row[name], name) for name in columns.keep},
    )


def _tokens(given: Any) -> list[int]:
    if given is None:
        return []
    whole = isinstance(given, Sequence) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in given
    )
    if not whole or not given or not all(0 <= token < LARGEST_TOKEN for token in given):
        raise ValueError("token ids are a list of whole numbers, at least one, from 0")
    return list(given)


def _messages(given: Any, name: str) -> list[dict[str, Any]]:
    if given is None:
        return []
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name!r} is neither a text nor a list of messages")
    for message in given:
        if not (
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and "content" in message
        ):
            raise ValueError(
                f"{name!r} has a message without role and content: {str(message)[:60]}"
            )
    return [dict(message) for message in given]


def _plain(value: Any, name: str) -> Any:
    """The value, if it may travel in a record. Raises ValueError otherwise."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!r} is {value}")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{name!r} is {type(value).__name__}; only texts and numbers can be kept")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, what is in it). A line that is not JSON is given as the error."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise ValueError(f"file {path} is no Parquet ({' '.join(str(error).split())})") from None
