"""Problems of a file: a prompt or its token ids, and the right answer. Lines that cannot be used
are named.

A sample (docs/design/grpo.md) has `prompt`, which is a text or a list of chat messages, or
`input_token_ids`, which is the exact prompt in the vocabulary of the policy. If it has both, the
ids count and the text is for people. Its right answer is `gt_answer`. Other columns may be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.envs.shipped.cells import (
    answer_in_cell,
    is_missing,
    prompt_messages,
    published,
    value_of,
)
from streamrl.envs.shipped.row_files import columns_of, read_rows
from streamrl.system.text import nearest_or_all

LARGEST_TOKEN = 2**32
RENAMED = ("prompt", "tokens", "answer")


class Columns(NamedTuple):
    """The names of the columns of a file."""

    prompt: str = "prompt"
    tokens: str = "input_token_ids"
    answer: str = "gt_answer"
    keep: tuple[str, ...] = ()

    @classmethod
    def named(
        cls, names: Any, keep: Sequence[str], default: Mapping[str, str] | None = None
    ) -> Columns:
        """Columns of which some have other names: those in `names`, and otherwise in `default`. A
        field of a structure is COLUMN.FIELD. Raises ValueError for an unknown one, and for what is
        no name.
        """
        if not isinstance(names, Mapping) or not all(
            isinstance(name, str) for name in names.values()
        ):
            raise ValueError(f"columns is {names!r}; write it as {{prompt: NAME, answer: NAME}}")
        if isinstance(keep, str):
            raise ValueError(f"keep is {keep!r}; write it as a list: [{keep}]")
        for name in names:
            if name not in RENAMED:
                raise ValueError(f"columns has {name!r}; {nearest_or_all(name, RENAMED)}")
        return cls(**{**(default or {}), **names}, keep=tuple(keep))


class Sample(NamedTuple):
    """One problem of a file."""

    line: int  # from 1; the row of a Parquet file
    messages: list[dict[str, Any]]
    tokens: list[int]  # if empty, the server's chat template makes them of the messages
    answer: Any  # a text, unless no reward of the env needs it
    kept: dict[str, Any]


def read(path: Path, columns: Columns, needs_answer: bool = True) -> list[Sample]:
    """All samples of a file, in order. Raises ValueError, which names the file or the lines that
    cannot be used.
    """
    return read_rows(path, "problems", lambda line, row: sample(line, row, columns, needs_answer))


def sample(line: int, row: Any, columns: Columns, needs_answer: bool) -> Sample:
    """The problem of a row. Raises ValueError if it is none; the text goes after file and line."""
    row = columns_of(row)
    has = f"it has {', '.join(map(str, row))}"
    for name in columns.keep:
        if not _has(row, name):
            raise ValueError(f"no {name!r} to keep; {has}")
    tokens = _tokens(_cell(row, columns.tokens))
    given = value_of(_cell(row, columns.prompt))
    messages = [] if is_missing(given) else prompt_messages(given, columns.prompt)
    if not (tokens or messages):
        raise ValueError(f"neither {columns.prompt!r} nor {columns.tokens!r}; {has}")
    answer = value_of(_cell(row, columns.answer))
    if needs_answer and answer is None:
        is_null = _has(row, columns.answer)
        raise ValueError(
            f"{columns.answer!r} is null" if is_null else f"no {columns.answer!r}; {has}"
        )
    return Sample(
        line=line,
        messages=messages,
        tokens=tokens,
        answer=answer_in_cell(answer, columns.answer) if needs_answer else _any_answer(answer),
        kept={name: published(_cell(row, name), name) for name in columns.keep},
    )


def instructed(sample: Sample, instruction: str) -> Sample:
    """The sample with an instruction at the end of its last user message. Raises ValueError if it
    has none.
    """
    if sample.tokens:
        raise ValueError("an instruction cannot follow a prompt of token ids")
    messages = [*sample.messages]
    for index in reversed(range(len(messages))):
        message = messages[index]
        if message["role"] == "user":
            messages[index] = {**message, "content": f"{message['content']}\n{instruction}"}
            return sample._replace(messages=messages)
    raise ValueError("no message of a user, which an instruction could follow")


def _has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column of this name, or a column with such a field."""
    column, dot, rest = name.partition(".")
    inner = row.get(column)
    return name in row or (bool(dot) and isinstance(inner, Mapping) and _has(inner, rest))


def _cell(row: Mapping[str, Any], name: str) -> Any:
    """The cell of a column, or of a field of one; None if there is none."""
    if name in row or not _has(row, name):
        return row.get(name)
    column, _, rest = name.partition(".")
    return _cell(row[column], rest)


def _any_answer(answer: Any) -> Any:
    """An answer that only functions of the run file read: a text if it is one or a number,
    otherwise the structure as it is. Empty if it is missing.
    """
    if is_missing(answer):
        return ""
    try:
        return answer_in_cell(answer, "")
    except ValueError:
        return answer


def _tokens(cell: Any) -> list[int]:
    given = value_of(cell)
    if is_missing(given):
        return []
    whole = isinstance(given, Sequence) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in given
    )
    if not whole or not given or not all(0 <= token < LARGEST_TOKEN for token in given):
        raise ValueError("token ids are a list of whole numbers, at least one, from 0")
    return list(given)
