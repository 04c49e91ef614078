"""Reads the rows of a data set on the Hugging Face hub, by the library `datasets`.

The files are those of one commit (`system/hub.py`). Code of a data set is not downloaded, and so
never runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamrl.envs.shipped.row_files import Row
from streamrl.system import hub
from streamrl.system.errors import describe_error


def hub_rows(name: str, subset: str, split: str) -> Iterator[Row]:
    """The rows of a split, numbered from 1. `name` is OWNER/NAME or OWNER/NAME@REVISION, `subset`
    is what the hub also calls a configuration; empty means the only one.

    Raises ValueError for what is no name, and for a subset or split that the data set does not
    have, and HubError as `hub.fetch` does.
    """
    parsed = hub.parse(name)
    if parsed is None:
        raise ValueError(f"hub: {name!r} is not the name of a data set; write OWNER/NAME")
    yield from _rows(hub.fetch(parsed, "dataset").directory, name, subset, split)


def _rows(directory: Path, name: str, subset: str, split: str) -> Iterator[Row]:
    from datasets import load_dataset  # it takes a second to import

    try:
        # Streamed, so that nothing is written next to the hub's own cache.
        rows = load_dataset(str(directory), subset or None, split=split, streaming=True)
        yield from enumerate(rows, 1)
    except Exception as error:  # the library raises what its readers raise
        raise ValueError(f"{name} {subset} {split}: {describe_error(error)}") from None
