"""The books that processors keep: the fate of every rollout, journals and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np

from streamrl.stream.records.fields import (
    Array,
    BatchNumber,
    Name,
    Record,
    check_lengths,
    misshapen,
)
from streamrl.stream.records.rollouts import Rollout

FateKind = Literal["batched", "expired", "filtered", "duplicate", "failed", "invalid"]
COLUMNS_OF_FATE = {"policy_versions": "i", "tokens": "i", "turns": "i", "rewards": "f"}
"""The columns that a fate may have, each with the kind of its dtype."""
ENV_REMOVED = "its env was taken out of the run"  # a `cause`


class Fate(Record, frozen=True, kw_only=True):
    """The final outcome of these rollouts. A fate belongs to a record of their topic:
    (partition, offset).
    """

    fate: FateKind
    environment: Name
    partition: int
    offsets: Array  # (n,) int64
    uids: list[Name] = []  # empty where they could not be read
    policy_versions: Array | None = None  # (n,) int32: of the oldest token of each
    # What the policy did in each. None where that could not be read.
    tokens: Array | None = None  # (n,) int32: that it sampled
    turns: Array | None = None  # (n,) int32: stretches of tokens that it sampled without a break
    rewards: Array | None = None  # (n,) float32
    batch: BatchNumber | None = None  # batched: into which
    cause: str = ""

    def __post_init__(self) -> None:
        check_lengths("fate", self, ("offsets",), len(self.uids) or self.offsets.size)
        if self.offsets.dtype.kind != "i":
            raise ValueError(f"fate: offsets must be integers, not {self.offsets.dtype}")
        for name, kind in COLUMNS_OF_FATE.items():
            values = getattr(self, name)
            if values is None:
                continue
            if values.dtype.kind != kind:
                words = {"i": "integers", "f": "floats"}[kind]
                raise ValueError(f"fate: {name} must be {words}, not {values.dtype}")
            if values.shape != self.offsets.shape:
                raise misshapen(f"fate: {name}", values, len(self.offsets))
        if (self.fate == "batched") != (self.batch is not None):
            raise ValueError(f"fate {self.fate} with batch {self.batch}")


class FateColumns(TypedDict, total=False):
    """What the policy did in the rollouts of a fate: the fields of that name."""

    policy_versions: np.ndarray
    tokens: np.ndarray
    turns: np.ndarray
    rewards: np.ndarray


def columns_of_fate(rollouts: Sequence[Rollout]) -> FateColumns:
    """The columns of the fate of these rollouts. A reward beyond float32 is its largest number."""
    largest = np.finfo(np.float32).max
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    return {
        "policy_versions": np.array([rollout.policy_version for rollout in rollouts], np.int32),
        "tokens": np.array([rollout.sampled_tokens for rollout in rollouts], np.int32),
        "turns": np.array([rollout.sampled_turns for rollout in rollouts], np.int32),
        "rewards": rewards.clip(-largest, largest).astype(np.float32),
    }


class Slice(Record, frozen=True, array_like=True, kw_only=True):
    """Records `start` to `end` (exclusive) of one input partition, `count` of them, taken in one
    go. Slices of a partition tile.
    """

    topic: str  # without the run's name
    partition: int
    start: int
    end: int
    count: int


class JournalEntry(Record, frozen=True, kw_only=True):
    """One transaction of a part: which slices it read, in order, and when. This is enough to run it
    again.

    Where `removed` is not None the part took no records: at its start it brought its state in line
    with its configuration (`Processor.reconcile`), and with what retention had deleted: of each
    (topic, partition, offset) everything below the offset.
    """

    sequence: int
    time_s: float
    slices: list[Slice]
    digest: bytes  # of the outputs
    output_count: int
    snapshot_offset: int = -1  # of the newest complete snapshot in this partition; -1: none
    config: str = ""  # JSON, at the start and at each change
    removed: list[tuple[str, int, int]] | None = None
    # whether records that were in the log when the part started were unread (`awake_clock.py`)
    is_behind: bool = False


class Snapshot(Record, frozen=True, kw_only=True):
    """A part's state after entry `sequence`, held records by reference."""

    sequence: int
    positions: list[tuple[str, int, int]]  # topic, partition, next offset
    state: bytes
    config: str  # JSON: what was in force
