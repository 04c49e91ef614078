"""What is kept of each rollout: where it lies, and a few numbers to find it by. Its tokens stay in
the topic and are read at their offset when asked.

Some 150 bytes a rollout; beyond `limit` of them, or `limit_bytes` of their uids and groups, the
oldest are forgotten, so memory is bounded however long the run is and whatever its envs call their
rollouts.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import numpy as np

from streamrl.recordings.audit import KINDS
from streamrl.records import Fate, Rollout

IN_FLIGHT = "in flight"
FATES = (*KINDS, IN_FLIGHT)
LIMIT = 1_000_000  # rollouts
LIMIT_BYTES = 256 * 2**20  # of uids and groups
# fates that may wait for their rollouts; of one that retention has removed, none comes
EARLY = 65_536
NAME_CHARS = 200  # of a uid or a group that are kept
AT_ONCE = 16_384  # rollouts that are looked through while nobody else may fold
NONE = -1  # no fate, no batch; a version that could not be read
NEVER = int(np.iinfo(np.int32).max)  # the step of an end that has not come

ROW = np.dtype(
    [
        ("env", np.uint16),  # index into `envs`
        ("partition", np.uint16),
        ("offset", np.int64),
        ("time_s", np.float64),  # of the record
        ("oldest", np.int32),  # policy version of the oldest token
        ("newest", np.int32),
        ("reward", np.float32),
        ("turns", np.uint16),
        ("tokens", np.int32),
        ("sampled", np.int32),  # tokens that the policy made
        ("truncated", np.bool_),
        ("fate", np.int8),  # index into KINDS
        ("batch", np.int32),  # that it is in
        ("ended", np.int32),  # step at which it met its fate
    ]
)
UNREADABLE = "an unreadable record"

Sort = Literal["newest", "oldest", "reward-high", "reward-low", "longest"]


class RolloutLocation(NamedTuple):
    """Where a rollout lies."""

    env: str
    partition: int
    offset: int


class Query(NamedTuple):
    """Which rollouts are wanted; what is not said does not matter."""

    env: str = ""
    fate: str = ""
    group: str = ""
    text: str = ""  # in the uid
    batch: int | None = None
    version_min: int | None = None  # of the oldest token
    version_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    sort: Sort = "newest"


class Selection(NamedTuple):
    """What a query finds, in the order wanted."""

    rows: np.ndarray  # (m,) int64
    rewards: np.ndarray  # (m,) float32


class PartitionIndex:
    """One partition's offsets, ascending, and the row of each."""

    def __init__(self) -> None:
        self.offsets, self.rows = array("q"), array("q")
        self.end = 0  # what lies below it has been read, also where it is forgotten

    def find(self, offset: int) -> int | None:
        at = bisect_left(self.offsets, offset)
        return self.rows[at] if at < len(self.offsets) and self.offsets[at] == offset else None


class Index:
    """A row for each rollout, in the order they were read."""

    def __init__(
        self, envs: Sequence[str], limit: int = LIMIT, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.envs = list(envs)
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.forgotten = 0  # rollouts that had a row; when it changes, rows have other numbers
        self._bytes = 0  # of uids and groups
        self.uids, self.groups = list[str](), list[str]()
        self._rows = np.zeros(1024, ROW)
        self._shelves: dict[tuple[str, int], PartitionIndex] = {}
        # fates that were read before their rollouts: fate, batch, ended
        self._early: dict[RolloutLocation, tuple[int, int, int]] = {}

    @property
    def rows(self) -> np.ndarray:
        """(n,) ROW."""
        return self._rows[: len(self.uids)]

    def add(
        self, place: RolloutLocation, time_s: float, rollout: Rollout | None, group: str
    ) -> None:
        """A rollout was published; None: a record that cannot be read."""
        shelf = self._shelves.setdefault((place.env, place.partition), PartitionIndex())
        if place.offset < shelf.end:
            return
        uid = _name(rollout.rollout_uid if rollout else UNREADABLE)
        # one text for all of a group
        group = sys.intern(_name(rollout.group_id if rollout else group))
        if len(self.uids) == self.limit or (
            self.uids and self._bytes + _bytes(uid, group) > self.limit_bytes
        ):
            self._forget(max(1, len(self.uids) // 4))
        n = len(self.uids)
        if n == len(self._rows):
            self._rows = np.resize(self._rows, 2 * n)
        env = self._env(place.env)
        fate, batch, ended = self._early.pop(place, (NONE, NONE, NEVER))
        if rollout is None:
            self._rows[n] = (
                env,
                place.partition,
                place.offset,
                time_s,
                NONE,
                NONE,
                np.nan,
                0,
                0,
                0,
                False,
                fate,
                batch,
                ended,
            )
        else:
            tokens = [0 if turn.tokens is None else len(turn.tokens) for turn in rollout.turns]
            sampled = sum(
                0 if turn.logprobs is None else len(turn.logprobs) for turn in rollout.turns
            )
            versions = rollout.policy_version, rollout.newest_policy_version
            what = (
                rollout.reward,
                min(len(tokens), 65_535),
                sum(tokens),
                sampled,
                rollout.truncated,
            )
            self._rows[n] = (
                env,
                place.partition,
                place.offset,
                time_s,
                *versions,
                *what,
                fate,
                batch,
                ended,
            )
        self.uids.append(uid)
        self.groups.append(group)
        self._bytes += _bytes(uid, group)
        shelf.offsets.append(place.offset)
        shelf.rows.append(n)
        shelf.end = place.offset + 1

    def end(self, fate: Fate, step: int) -> None:
        """Rollouts met their fate at this step."""
        shelf = self._shelves.setdefault((fate.environment, fate.partition), PartitionIndex())
        what = (
            KINDS.index(fate.fate),
            NONE if fate.batch is None else _int32(fate.batch),
            min(_int32(step), NEVER - 1),
        )
        for offset in fate.offsets.tolist():
            row = shelf.find(offset)
            if row is not None:
                self._rows["fate"][row], self._rows["batch"][row], self._rows["ended"][row] = what
            elif offset >= shelf.end:
                self._early[RolloutLocation(fate.environment, fate.partition, offset)] = what
                if len(self._early) > EARLY:
                    del self._early[next(iter(self._early))]

    def find(self, place: RolloutLocation) -> int | None:
        """Its row; None for one that is not known, or forgotten."""
        shelf = self._shelves.get((place.env, place.partition))
        return shelf.find(place.offset) if shelf else None

    def place(self, row: int) -> RolloutLocation:
        found = self._rows[row]
        return RolloutLocation(
            self.envs[found["env"]], int(found["partition"]), int(found["offset"])
        )

    def fates(self, step: int | None = None, start: int = 0, end: int | None = None) -> np.ndarray:
        """(n,) int8: index into FATES of each rollout from row `start` to `end`, as it was at the
        end of that step; default: as it is.
        """
        rows = self.rows[start:end]
        known = rows["ended"] <= (NEVER - 1 if step is None else step)
        return np.where(known, rows["fate"], np.int8(len(KINDS)))

    def select(
        self,
        query: Query,
        step: int | None = None,
        before_s: float = np.inf,
        lock: AbstractContextManager[object] | None = None,
    ) -> Selection:
        """What is wanted, in the order wanted, as it was at the end of `step`: published before
        `before_s`.

        `lock` is held for `AT_ONCE` rollouts at a time. Rows that are forgotten meanwhile make the
        result useless; `forgotten` has changed then.
        """
        lock = lock or nullcontext()
        numbers = [np.zeros(0, np.int64)]
        matches = [np.zeros(0, ROW)]
        start = 0
        end = len(self.uids)
        while start < end:
            with lock:
                found = self._matching(
                    query, step, before_s, start, min(start + AT_ONCE, end, len(self.uids))
                )
                numbers.append(found)
                matches.append(self.rows[found])
            start += AT_ONCE
        rows = np.concatenate(numbers)
        kept = np.concatenate(matches)
        order = _order(kept, query.sort)
        return Selection(rows[order], kept["reward"][order])

    def _matching(
        self, query: Query, step: int | None, before_s: float, start: int, end: int
    ) -> np.ndarray:
        """(m,) int64: of the rows from `start` to `end` those that are wanted."""
        rows = self.rows[start:end]
        mask = rows["time_s"] < before_s
        if query.env:
            mask &= rows["env"] == (
                self.envs.index(query.env) if query.env in self.envs else len(self.envs)
            )
        if query.fate:
            mask &= self.fates(step, start, end) == FATES.index(query.fate)
        if query.batch is not None:
            mask &= (rows["batch"] == query.batch) & (
                rows["ended"] <= (NEVER - 1 if step is None else step)
            )
        for column, low, high in (
            ("oldest", query.version_min, query.version_max),
            ("reward", query.reward_min, query.reward_max),
        ):
            mask &= rows[column] >= low if low is not None else True
            mask &= rows[column] <= high if high is not None else True
        found = np.flatnonzero(mask) + start
        if query.group:
            group = _name(query.group)
            found = found[[self.groups[row] == group for row in found.tolist()]]
        if query.text:
            found = found[[query.text in self.uids[row] for row in found.tolist()]]
        return found

    def _env(self, name: str) -> int:
        if name not in self.envs:  # one that has been taken out of the run
            self.envs.append(name)
        return self.envs.index(name)

    def _forget(self, count: int) -> None:
        """Drop the `count` oldest."""
        self.forgotten += count
        keep = np.ones(len(self.uids), bool)
        keep[np.argsort(self.rows["time_s"], kind="stable")[:count]] = False
        kept = np.flatnonzero(keep)
        number = np.cumsum(keep) - 1  # of each row, from now on
        self._rows = np.concatenate([self._rows[kept], np.zeros(count, ROW)])
        self.uids, self.groups = (
            [self.uids[i] for i in kept.tolist()],
            [self.groups[i] for i in kept.tolist()],
        )
        self._bytes = sum(map(_bytes, self.uids, self.groups))
        for shelf in self._shelves.values():
            stay = [
                (offset, int(number[row]))
                for offset, row in zip(shelf.offsets, shelf.rows, strict=True)
                if keep[row]
            ]
            shelf.offsets, shelf.rows = (
                array("q", [offset for offset, _ in stay]),
                array("q", [row for _, row in stay]),
            )


def _order(rows: np.ndarray, sort: Sort) -> np.ndarray:
    """(m,) int64: the order of (m,) ROW."""
    newest = -rows["time_s"]
    first = {
        "newest": newest,
        "oldest": -newest,
        "reward-high": -rows["reward"],
        "reward-low": rows["reward"],
        "longest": -rows["tokens"],
    }[sort]
    return np.lexsort((newest, first))  # nan, of what cannot be read, is last


def _name(text: str) -> str:
    """A uid or a group as far as it is kept."""
    return text if len(text) <= NAME_CHARS else text[: NAME_CHARS - 1] + "…"


def _int32(value: int) -> int:
    """The nearest number that a column can hold: a record may say anything."""
    return max(-NEVER, min(value, NEVER))


def _bytes(uid: str, group: str) -> int:
    return sys.getsizeof(uid) + sys.getsizeof(group)
