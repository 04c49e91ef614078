"""Reads the rows of a file: JSON Lines, JSON, CSV or Parquet, as its name ends."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
NAMED = 5  # How many further lines that cannot be used an error names.
BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
LFS_POINTER = b"version https://git-lfs"
LARGEST_CELL = 1 << 27  # characters of a cell of a CSV file
DELIMITERS = {".csv": ",", ".tsv": "\t"}
KINDS = ".jsonl, .json, .csv, .tsv or .parquet"

Row = tuple[int, Any]
"""Line number and row. A line that holds no row has the ValueError instead."""


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file, each with its line, or its number in a Parquet file or a JSON array; both
    count from 1. A line that cannot be read is given as the error. Raises ValueError for a file
    that cannot.
    """
    try:
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            yield from _parquet(path)
        elif suffix in DELIMITERS:
            yield from _csv(path)
        elif suffix in (".jsonl", ".ndjson", ".json"):
            yield from _json(path)
        else:
            raise ValueError(f"file {path}: name it {KINDS}, by what is in it")
    except OSError as error:
        raise ValueError(f"file {path} cannot be read ({error.strerror or error})") from None


def columns_of(row: Any) -> Mapping[str, Any]:
    """The columns of a row by name. Raises ValueError if the line holds no row; the text goes after
    file and line.
    """
    if isinstance(row, Exception):
        raise ValueError(str(row))
    if not isinstance(row, Mapping):
        raise ValueError(f"not a map of columns but {type(row).__name__}")
    return row


def read_rows(path: Path, what: str, parse: Callable[[int, Any], T]) -> list[T]:
    """What `parse` makes of each line and row of a file, as `parse_rows` does."""
    return parse_rows(rows(path), str(path), what, parse)


def parse_rows(
    given: Iterable[Row], source: str, what: str, parse: Callable[[int, Any], T]
) -> list[T]:
    """What `parse` makes of each line and row. Raises ValueError, which names the `source` and the
    lines that cannot be used, or if the source has none of `what`.
    """
    items: list[T] = []
    bad: list[tuple[int, str]] = []
    for line, row in given:
        try:
            items.append(parse(line, columns_of(row)))
        except RecursionError:
            bad.append((line, "nested too deeply"))
        except ValueError as error:
            bad.append((line, str(error)))
    if bad:
        raise ValueError(unusable(source, bad))
    if not items:
        raise ValueError(f"file {source} has no {what}")
    return items


def unusable(source: str, bad: Sequence[tuple[int, str]]) -> str:
    """The error for lines that cannot be used: what is wrong with the first, and which others."""
    line, cause = bad[0]
    text = f"{source}:{line}: {cause}"
    others = [str(other) for other, _ in bad[1 : NAMED + 1]]
    if others:
        lines = "line" if len(others) == 1 else "lines"
        text += f"; {lines} {', '.join(others)} neither"
    if len(bad) > NAMED:
        text += f" ({len(bad)} in all)"
    return text


def _json(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        start = file.read(64)
        _check_start(path, start)
        file.seek(len(BOM) if start.startswith(BOM) else 0)
        if path.suffix.lower() == ".json" and start.removeprefix(BOM).lstrip().startswith(b"["):
            yield from enumerate(_array(path, file.read()), 1)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parsed(line)


def _array(path: Path, data: bytes) -> list[Any]:
    array = _parsed(data)
    if isinstance(array, ValueError):
        raise ValueError(f"file {path} is {array}")
    return array


def _parsed(data: bytes) -> Any:
    """The value of a JSON text, or a ValueError with the reason why it is none."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 ({error.reason} at byte {error.start})")
    except RecursionError:
        return ValueError("not JSON (nested too deeply)")
    except ValueError as error:
        return ValueError(f"not JSON ({error})")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"{_duplicate(name for name, _ in pairs)!r} is there twice")
    return fields


def _duplicate(names: Iterable[str]) -> str | None:
    """The first name that is there twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _check_start(path: Path, start: bytes) -> None:
    """Raises ValueError for a file that begins as no file with rows does."""
    if start.startswith(LFS_POINTER):
        raise ValueError(f"file {path} is a pointer of Git LFS; `git lfs pull` fetches the file")
    if start.startswith(UTF16):
        raise ValueError(f"file {path} is UTF-16 or UTF-32; store it as UTF-8")


def _csv(path: Path) -> Iterator[Row]:
    """The rows of a CSV file: texts, or None for an empty cell. The first row has the names."""
    data = path.read_bytes()
    _check_start(path, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"file {path} is not UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    csv.field_size_limit(LARGEST_CELL)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=DELIMITERS[path.suffix.lower()], strict=True
    )
    try:
        names = next(reader, [])
        twice = _duplicate(names)
        if twice is not None:
            raise ValueError(f"file {path}: two columns have the name {twice!r}; rename one")
        begin = reader.line_num + 1
        for cells in reader:
            if len(cells) == len(names):
                row = {name: cell or None for name, cell in zip(names, cells, strict=True)}
                yield begin, row
            elif cells:  # an empty line is no row
                yield begin, ValueError(f"{len(cells)} cells, but {len(names)} columns have names")
            begin = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with path.open("rb") as file:
        _check_start(path, file.read(64))
    try:
        with pq.ParquetFile(path) as file:
            twice = _duplicate(file.schema_arrow.names)
            if twice is not None:
                raise ValueError(f"file {path}: two columns have the name {twice!r}; rename one")
            for batch in file.iter_batches():
                for row in _shortest(batch).to_pylist():
                    number += 1
                    yield number, {name: _without_nulls(cell) for name, cell in row.items()}
    except pa.ArrowException as error:
        raise ValueError(f"file {path} is no Parquet ({' '.join(str(error).split())})") from None


def _shortest(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch whose numbers of single precision are the doubles of the same spelling: 0.1 and not
    0.10000000149011612.
    """
    import pyarrow as pa

    for index, field in enumerate(batch.schema):
        if field.type == pa.float32():
            column = batch.column(index).cast(pa.string()).cast(pa.float64())
            batch = batch.set_column(index, field.name, column)
    return batch


def _without_nulls(cell: Any) -> Any:
    """A cell without the fields of its structures that are null, which a Parquet file has for the
    fields of other rows.
    """
    if isinstance(cell, dict):
        return {name: _without_nulls(value) for name, value in cell.items() if value is not None}
    if isinstance(cell, list):
        return [_without_nulls(value) for value in cell]
    return cell
