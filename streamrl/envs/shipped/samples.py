"""Problems from files: JSON Lines or Parquet, a prompt or its token ids, and the right answer. What
cannot be used is named by file and line.

A sample (docs/design/grpo.md) has `prompt`, a text or a list of chat messages, or
`input_token_ids`, the very prompt in the vocabulary of the policy. Where it has both, the ids count
and the text is for people. Its right answer is `gt_answer`. Other columns may be kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
NAMED = 5  # lines that cannot be used, in an error
LARGEST_TOKEN = 2**32


class Columns(NamedTuple):
    """What the columns of a file are called."""

    prompt: str = "prompt"
    tokens: str = "input_token_ids"
    answer: str = "gt_answer"
    keep: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One problem of a file."""

    line: int  # from 1; of a Parquet file, its row
    messages: list[dict[str, Any]]
    tokens: list[int]  # empty: the server's chat template makes them of the messages
    answer: str
    kept: dict[str, Any]


def read(path: Path, columns: Columns, needs_answer: bool = True) -> list[Sample]:
    """All samples of a file, in order. Raises ValueError that names the lines it cannot use, or the
    file.
    """
    samples, bad = list[Sample](), list[tuple[int, str]]()
    for line, row in rows(path):
        try:
            samples.append(sample(line, row, columns, needs_answer))
        except ValueError as error:
            bad.append((line, str(error)))
    if bad:
        others = [str(line) for line, _ in bad[1 : NAMED + 1]]
        more = f"; line{'s' * (len(others) > 1)} {', '.join(others)} neither" if others else ""
        raise ValueError(
            f"{path}:{bad[0][0]}: {bad[0][1]}{more}{f' ({len(bad)} in all)' if len(bad) > NAMED else ''}"
        )
    if not samples:
        raise ValueError(f"file {path} has no problems")
    return samples


def parsed(path: Path, what: str, parse: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """(line, what `parse` makes of its JSON). `what` a line should be is for the error. Raises
    ValueError that names the line, or the file.
    """
    try:
        for line, data in json_lines(path):
            try:
                if isinstance(data, ValueError):
                    raise data
                made = parse(data)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{line}: not {what} ({type(error).__name__}: {error})"
                ) from None
            yield line, made
    except OSError as error:
        raise ValueError(f"file {path} cannot be read ({error.strerror})") from None


def rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, what is in it) of a file, by its ending; a line that is no JSON is given as the error.
    Raises ValueError for a file that is neither.
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
    """One problem. Raises ValueError for what is none, in words that go behind file and line."""
    if isinstance(row, Exception):
        raise ValueError(f"not JSON ({row})")
    if not isinstance(row, Mapping):
        raise ValueError(f"not a map of columns but {type(row).__name__}")
    has = f"it has {', '.join(map(str, row))}"
    for name in columns.keep:
        if name not in row:
            raise ValueError(f"no {name!r} to keep; {has}")
    tokens, messages = (
        _tokens(row.get(columns.tokens)),
        _messages(row.get(columns.prompt), columns.prompt),
    )
    if not (tokens or messages):
        raise ValueError(f"neither {columns.prompt!r} nor {columns.tokens!r}; {has}")
    answer = row.get(columns.answer)
    if needs_answer and not (isinstance(answer, str | int | float) and str(answer).strip()):
        raise ValueError(
            f"no {columns.answer!r}; {has}"
            if answer is None
            else f"{columns.answer!r} is {answer!r}, not an answer"
        )
    return Sample(
        line,
        messages,
        tokens,
        "" if answer is None else str(answer),
        {name: _plain(row[name], name) for name in columns.keep},
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
    if bad := [
        message
        for message in given
        if not (
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and "content" in message
        )
    ]:
        raise ValueError(f"{name!r} has a message without role and content: {str(bad[0])[:60]}")
    return [dict(message) for message in given]


def _plain(value: Any, name: str) -> Any:
    """What may travel in a record."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!r} is {value}")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{name!r} is {type(value).__name__}; only texts and numbers can be kept")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, what is in it); a line that is no JSON is given as the error."""
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
