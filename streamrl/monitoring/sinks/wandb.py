"""Weights & Biases: one W&B run for the whole run, over all its sessions. The key is W&B's own
business (`wandb login`, WANDB_API_KEY).

With `mode: offline` nothing leaves the machine; `wandb sync` sends what lies in `wandb/` of the
run's directory, all sessions of it.
"""

# pyright: reportAttributeAccessIssue=false
# messages of protobuf are made when it is imported

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as wire

from streamrl.monitoring.sinks.base import Entry, Had, Place

STEP = "step"  # the axis: W&B's own step only counts rows
HEADER, BLOCK, HEAD = 7, 32_768, 7  # bytes, of its files: LevelDB's log format behind a header
FULL, FIRST, LAST = 1, 2, 4  # kinds of a piece


class WandB:
    """What it has is read from the files that W&B keeps of every session, sent or not."""

    def __init__(
        self,
        place: Place,
        project: str = "streamrl",
        name: str = "",
        id: str = "",
        mode: str = "",
        **options: Any,
    ) -> None:
        """`name`, `id`: of the W&B run; default: the run's. `mode`: online, offline, disabled.
        `options`: of wandb.init, as `entity`, `tags`.
        """
        run = place.run
        self._had = Had()
        for row in rows(run.directory / "wandb"):
            for curve in row.keys() - {STEP}:
                self._had.add(curve, int(row[STEP]))
        run.directory.mkdir(parents=True, exist_ok=True)
        wait_for_a_name(run.directory / "wandb")
        quiet = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            save_code=False,
            disable_git=True,
        )
        told: dict[str, Any] = {
            "mode": mode or None,
            "config": run.model_dump(mode="json"),
            "dir": str(run.directory),
            "settings": quiet,
        }
        self._run = wandb.init(
            project=project,
            name=name or run.run,
            id=id or run.run,
            resume="allow",
            **told,
            **options,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def take(self, entries: Sequence[Entry]) -> None:
        for row in self._had.new(entries):
            self._run.log({STEP: row.step, **row.values})

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # `finish` does not wait for W&B's own process, which writes the file


def wait_for_a_name(directory: Path) -> None:
    """W&B names the directory of a session by the second it begins in, and a second session of that
    second would write over the first.
    """
    while any(directory.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)


def rows(directory: Path) -> Iterator[dict[str, float]]:
    """What was logged in all sessions whose files lie there, oldest first."""
    for path in sorted(directory.glob("*run-*/run-*.wandb")):
        for record in records(path.read_bytes()):
            found = wire.Record.FromString(record)
            if found.WhichOneof("record_type") == "history":
                values = {
                    (item.key or item.nested_key[0]): json.loads(item.value_json)
                    for item in found.history.item
                }
                if STEP in values:
                    yield {
                        name: value for name, value in values.items() if not name.startswith("_")
                    }


def records(data: bytes) -> Iterator[bytes]:
    """The records of one file, up to the first that is not whole. Format: LevelDB,
    doc/log_format.md.
    """
    at, whole = HEADER, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", data, at) if left >= HEAD else (0, 0, 0)
        if kind == 0:  # the rest of a block is empty
            at += left
            continue
        piece = data[at + HEAD : at + HEAD + size]
        if len(piece) < size:
            return
        whole = piece if kind in (FULL, FIRST) else whole + piece
        at += HEAD + size
        if kind in (FULL, LAST):
            yield whole
