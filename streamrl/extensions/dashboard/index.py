"""The index of rollouts: of each rollout its place in the log, and a few numbers to find it by. Its
tokens stay in the topic and are read from their offset on request.

A rollout takes about 150 bytes. The oldest rollouts are forgotten when there are more than `limit`,
or when their uids and groups take more than `limit_bytes`. So memory is bounded, whatever the
length of the run and of its uids.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np

from streamrl.config import topology
from streamrl.extensions.recordings.audit import KINDS
from streamrl.stream.records import Fate, Rollout

IN_FLIGHT = "in flight"
FATES = (*KINDS, IN_FLIGHT)
LIMIT = 1_000_000  # rollouts
LIMIT_BYTES = 256 * 2**20  # of uids and groups
# At most this many fates are kept for rollouts that have not been read yet. If retention has
# removed a rollout, it is never read.
EARLY = 65_536
NAME_CHARS = 200  # A uid or a group is cut to this length.
AT_ONCE = 16_384  # A query holds the lock for at most this many rollouts.
NONE = -1  # There is no fate, no batch, or no version that could be read.
NEVER = int(np.iinfo(np.int32).max)  # The `ended` of a rollout without a fate.

ROW = np.dtype(
    [
        ("env", np.uint16),  # index into `envs`
        ("partition", np.uint16),
        ("offset", np.int64),
        ("time_s", np.float64),  # time of the record
        ("oldest", np.int32),  # policy version of the oldest token
        ("newest", np.int32),  # policy version of the newest token
        ("reward", np.float32),
        ("turns", np.uint16),
        ("tokens", np.int32),
        ("sampled", np.int32),  # tokens that the policy sampled
        ("truncated", np.bool_),
        ("fate", np.int8),  # index into KINDS, or NONE
        ("batch", np.int32),  # batch that it is in, or NONE
        ("ended", np.int32),  # step at which it met its fate, or NEVER
    ]
)
UNREADABLE = "an unreadable record"

Sort = Literal["newest", "oldest", "reward-high", "reward-low", "longest"]


class RolloutLocation(NamedTuple):
    """The place of a rollout in the log, in the topic of its env."""

    env: str
    partition: int
    offset: int


class Query(NamedTuple):
    """The rollouts that are wanted. A field that is empty or None matches all rollouts."""

    env: str = ""
    fate: str = ""  # one of FATES
    group: str = ""
    text: str = ""  # a part of the uid
    batch: int | None = None
    version_min: int | None = None  # bounds of the version of the oldest token
    version_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    sort: Sort = "newest"


class QueryResult(NamedTuple):
    """The rollouts that a query finds, in the order wanted."""

    rows: np.ndarray  # (m,) int64: numbers of rows
    rewards: np.ndarray  # (m,) float32


class PartitionIndex:
    """The rows of the rollouts of one partition."""

    def __init__(self) -> None:
        self.offsets = array("q")  # ascending
        self.rows = array("q")  # the number of the row of each
        self.end = 0  # all offsets below it have been read, also those that are forgotten

    def find(self, offset: int) -> int | None:
        """The row of the rollout at this offset, or None."""
        at = bisect_left(self.offsets, offset)
        if at < len(self.offsets) and self.offsets[at] == offset:
            return self.rows[at]
        return None


class RolloutEnd(NamedTuple):
    """The columns of a row that tell how a rollout ended."""

    fate: int = NONE
    batch: int = NONE
    ended: int = NEVER


class Index:
    """A row for each rollout, in the order in which they were read."""

    def __init__(
        self, envs: Sequence[str], limit: int = LIMIT, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.envs = list(envs)
        self.limit = limit
        self.limit_bytes = limit_bytes
        # The number of rollouts that have been forgotten. When it changes, rows change their
        # numbers.
        self.forgotten = 0
        self.uids = list[str]()
        self.groups = list[str]()
        self._bytes = 0  # of uids and groups
        self._rows = np.zeros(1024, ROW)
        # (family, partition), as a family's envs share a topic
        self._partitions: dict[tuple[str, int], PartitionIndex] = {}
        # The ends of rollouts that were read before the rollouts themselves.
        self._early: dict[tuple[str, int, int], RolloutEnd] = {}  # by family, partition, offset

    @property
    def rows(self) -> np.ndarray:
        """(n,) ROW: the rows of all rollouts."""
        return self._rows[: len(self.uids)]

    def add(
        self, place: RolloutLocation, time_s: float, rollout: Rollout | None, group: str
    ) -> None:
        """Add a rollout that was published at `time_s`, or None for a record that cannot be read.
        `group`: the key of the record. A rollout that has been added before is ignored.
        """
        partition = self._partition(place.env, place.partition)
        if place.offset < partition.end:
            return
        uid = _name(rollout.rollout_uid if rollout else UNREADABLE)
        # Interning makes the rollouts of a group share one text.
        group = sys.intern(_name(rollout.group_id if rollout else group))
        size_bytes = _bytes(uid, group)
        if len(self.uids) == self.limit or (
            self.uids and self._bytes + size_bytes > self.limit_bytes
        ):
            self._forget(max(1, len(self.uids) // 4))
        n = len(self.uids)
        if n == len(self._rows):
            self._rows = np.resize(self._rows, 2 * n)
        early = topology.family_of(place.env), place.partition, place.offset
        end = self._early.pop(early, RolloutEnd())
        where = (self._env(place.env), place.partition, place.offset, time_s)
        self._rows[n] = (*where, *_values_of(rollout), *end)
        self.uids.append(uid)
        self.groups.append(group)
        self._bytes += size_bytes
        partition.offsets.append(place.offset)
        partition.rows.append(n)
        partition.end = place.offset + 1

    def end(self, fate: Fate, step: int) -> None:
        """Note that rollouts met this fate at `step`."""
        partition = self._partition(fate.environment, fate.partition)
        end = RolloutEnd(
            fate=KINDS.index(fate.fate),
            batch=NONE if fate.batch is None else _int32(fate.batch),
            ended=min(_int32(step), NEVER - 1),
        )
        for offset in fate.offsets.tolist():
            row = partition.find(offset)
            if row is not None:
                self._rows["fate"][row] = end.fate
                self._rows["batch"][row] = end.batch
                self._rows["ended"][row] = end.ended
            elif offset >= partition.end:
                early = topology.family_of(fate.environment), fate.partition, offset
                self._early[early] = end
                if len(self._early) > EARLY:
                    del self._early[next(iter(self._early))]

    def find(self, place: RolloutLocation) -> int | None:
        """The row of the rollout at this place, or None if it is not known or is forgotten."""
        key = topology.family_of(place.env), place.partition
        partition = self._partitions.get(key)
        return partition.find(place.offset) if partition else None

    def place(self, row: int) -> RolloutLocation:
        """The place of the rollout that has this row."""
        values = self._rows[row]
        return RolloutLocation(
            self.envs[values["env"]], int(values["partition"]), int(values["offset"])
        )

    def fates(self, step: int | None = None, start: int = 0, end: int | None = None) -> np.ndarray:
        """(n,) int8: the index into FATES of each rollout from row `start` to `end`, at the end of
        `step`, or now if no step is given.
        """
        rows = self.rows[start:end]
        return np.where(has_ended(rows["ended"], step), rows["fate"], np.int8(len(KINDS)))

    def select(
        self,
        query: Query,
        step: int | None = None,
        before_s: float = np.inf,
        lock: AbstractContextManager[object] | None = None,
    ) -> QueryResult:
        """The rollouts that match `query` at the end of `step`, or now if no step is given, and
        that were published before `before_s`.

        `lock` is held for `AT_ONCE` rollouts at a time. If rollouts are forgotten meanwhile, which
        changes `forgotten`, then the rows of the result are wrong.
        """
        lock = lock or nullcontext()
        numbers = [np.zeros(0, np.int64)]
        matches = [np.zeros(0, ROW)]
        start = 0
        end = len(self.uids)
        while start < end:
            with lock:
                piece_end = min(start + AT_ONCE, end, len(self.uids))
                matching = self._matching(query, step, before_s, start, piece_end)
                numbers.append(matching)
                matches.append(self.rows[matching])
            start += AT_ONCE
        rows = np.concatenate(numbers)
        kept = np.concatenate(matches)
        order = _order(kept, query.sort)
        return QueryResult(rows[order], kept["reward"][order])

    def _matching(
        self, query: Query, step: int | None, before_s: float, start: int, end: int
    ) -> np.ndarray:
        """(m,) int64: the numbers of the rows from `start` to `end` that match."""
        rows = self.rows[start:end]
        mask = rows["time_s"] < before_s
        if query.env:
            # No row has the number of an env that is not known.
            env = self.envs.index(query.env) if query.env in self.envs else len(self.envs)
            mask &= rows["env"] == env
        if query.fate:
            mask &= self.fates(step, start, end) == FATES.index(query.fate)
        if query.batch is not None:
            mask &= rows["batch"] == query.batch
            mask &= has_ended(rows["ended"], step)
        for column, low, high in (
            ("oldest", query.version_min, query.version_max),
            ("reward", query.reward_min, query.reward_max),
        ):
            if low is not None:
                mask &= rows[column] >= low
            if high is not None:
                mask &= rows[column] <= high
        numbers = np.flatnonzero(mask) + start
        if query.group:
            group = _name(query.group)
            numbers = numbers[[self.groups[row] == group for row in numbers.tolist()]]
        if query.text:
            numbers = numbers[[query.text in self.uids[row] for row in numbers.tolist()]]
        return numbers

    def _partition(self, env: str, number: int) -> PartitionIndex:
        key = topology.family_of(env), number
        return self._partitions.setdefault(key, PartitionIndex())

    def _env(self, name: str) -> int:
        if name not in self.envs:  # The env has been removed from the run file.
            self.envs.append(name)
        return self.envs.index(name)

    def _forget(self, count: int) -> None:
        """Remove the rows of the `count` oldest rollouts."""
        self.forgotten += count
        keep = np.ones(len(self.uids), bool)
        keep[np.argsort(self.rows["time_s"], kind="stable")[:count]] = False
        kept = np.flatnonzero(keep)
        new_numbers = np.cumsum(keep) - 1  # by old number
        self._rows = np.concatenate([self._rows[kept], np.zeros(count, ROW)])
        self.uids = [self.uids[row] for row in kept.tolist()]
        self.groups = [self.groups[row] for row in kept.tolist()]
        self._bytes = sum(map(_bytes, self.uids, self.groups))
        for partition in self._partitions.values():
            old = list(zip(partition.offsets, partition.rows, strict=True))
            partition.offsets = array("q", [offset for offset, row in old if keep[row]])
            partition.rows = array("q", [int(new_numbers[row]) for _, row in old if keep[row]])


def has_ended(ended: np.ndarray, step: int | None) -> np.ndarray:
    """Whether rollouts have met their fates at the end of `step`, or by now if no step is given.
    `ended`: the values of their column.
    """
    return ended <= (NEVER - 1 if step is None else step)


def _values_of(rollout: Rollout | None) -> tuple[Any, ...]:
    """The columns from `oldest` to `truncated`."""
    if rollout is None:
        return (NONE, NONE, np.nan, 0, 0, 0, False)
    return (
        rollout.policy_version,
        rollout.newest_policy_version,
        rollout.reward,
        min(len(rollout.turns), np.iinfo(np.uint16).max),
        _int32(rollout.total_tokens),  # sequences that share tokens have them each
        rollout.sampled_tokens,
        rollout.truncated,
    )


def _order(rows: np.ndarray, sort: Sort) -> np.ndarray:
    """(m,) int64: the indices that sort `rows`, (m,) ROW. Rows with equal keys are sorted by time,
    the newest first. Rows without a reward come last.
    """
    newest = -rows["time_s"]
    keys = {
        "newest": newest,
        "oldest": -newest,
        "reward-high": -rows["reward"],
        "reward-low": rows["reward"],
        "longest": -rows["tokens"],
    }
    return np.lexsort((newest, keys[sort]))


def _name(text: str) -> str:
    """A uid or a group, cut to NAME_CHARS."""
    return text if len(text) <= NAME_CHARS else text[: NAME_CHARS - 1] + "…"


def _int32(value: int) -> int:
    """The nearest value that a column can hold, because a record may contain any number."""
    return max(-NEVER, min(value, NEVER))


def _bytes(uid: str, group: str) -> int:
    return sys.getsizeof(uid) + sys.getsizeof(group)
