"""Weights & Biases: one W&B run for the whole run, over all its sessions. The key is W&B's own
business (`wandb login`, WANDB_API_KEY).

With `mode: offline` nothing leaves the machine; `wandb sync` sends what lies in `wandb/` of the
run's directory, all sessions of it.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes its message classes when it is imported, so pyright does not know them.

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as wire

from streamrl.monitoring.sinks.base import MetricRecord, SinkContext, WrittenPoints

STEP = "step"  # the x axis, as W&B's own step only counts rows
# Sizes in bytes of W&B's files, which have LevelDB's log format after a header.
HEADER = 7
BLOCK = 32_768
HEAD = 7
# the kinds of a piece of a record
FULL = 1
FIRST = 2
LAST = 4


class WandB:
    """Reads its earlier points from the files that W&B keeps of every session, sent or not."""

    def __init__(
        self,
        context: SinkContext,
        project: str = "streamrl",
        name: str = "",
        id: str = "",
        mode: str = "",
        **options: Any,
    ) -> None:
        """`name`, `id`: of the W&B run; default: the run's. `mode`: online, offline, disabled.
        `options`: of wandb.init, as `entity`, `tags`.
        """
        run = context.run
        self._had = WrittenPoints()
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

    def write(self, records: Sequence[MetricRecord]) -> None:
        for row in self._had.new(records):
            self._run.log({STEP: row.step, **row.values})

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # `finish` does not wait for W&B's own process, which writes the file


def wait_for_a_name(directory: Path) -> None:
    """Wait until no session directory has the name that W&B would give to this one.

    W&B names the directory by the second in which a session begins. A second session in the same
    second would overwrite the first.
    """
    while any(directory.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
        time.sleep(0.05)


def rows(directory: Path) -> Iterator[dict[str, float]]:
    """The rows that were logged in all sessions whose files lie there, the oldest first."""
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
    """The records of one file up to the first that is not whole.

    The format is described in LevelDB's doc/log_format.md.
    """
    at = HEADER
    whole = b""
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
