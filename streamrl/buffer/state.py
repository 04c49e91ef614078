"""The buffer's configuration, and its state: the open groups of each env, and the ids that it
remembers.

The journal has BufferConfig as JSON, and snapshots have BufferState, both by the names of the
fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from streamrl.buffer.groups import rollout_of
from streamrl.buffer.staleness import FUTURE_VERSIONS, expires_next
from streamrl.buffer.stats import IntakeStats
from streamrl.stream.log.protocol import Event
from streamrl.stream.processor.awake_clock import AwakeClock
from streamrl.stream.records import LossWeights, Rollout

# A window holds at most so many bytes of records for each token that it may hold. The id and the
# logprob of a token are 8 bytes, and its text is about as many.
BYTES_PER_TOKEN = 64
OBJECT_BYTES = 100  # of a header, a turn, a named reward or a version span
# The most ids that are remembered for each env: of rollouts and of closed groups, however few
# versions come, and of counted groups (`Window.counted`).
REMEMBERED_IDS = 200_000
COUNTED_GROUPS = 10_000
PATIENCE = 10  # times `group_wait_s` that a group below its minimum waits
# What becomes of a rollout that arrives (`arrival.py`).
Outcome = Literal["refused", "duplicate", "misaligned", "late", "failed", "expired", "held"]


@dataclass(frozen=True)
class BufferConfig:
    """When a group closes, what is refused, and how long ids are remembered."""

    envs: tuple[str, ...]
    learner: str  # whose versions count
    group_size: int  # rollouts per problem
    min_group_size: int
    max_age: int  # policy versions
    max_window_tokens: int  # of one env, in this shard
    remember_versions: int  # policy versions for which uids and closed groups are remembered
    advantage: str
    zero_advantage: Literal["keep", "filter"] = "keep"
    # versions that a rollout may be ahead of the newest announced one; it is held until then
    ahead: int = FUTURE_VERSIONS
    group_wait_s: float = 60.0  # a group without a new rollout for so long closes with what it has
    # As long as sessions of a group are open, or may be: it waits for so long after a rollout. 0:
    # the env has no sessions.
    session_wait_s: float = 0.0
    max_seq_len: int = 0  # of the model; 0: not known
    partitions: int = 0  # of a topic of rollouts; 0: not known
    # by env: the rules among these that it has for itself
    own: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    # For a fork: no rollouts are read before this version is announced. Inherited rollouts would
    # otherwise look as if they came from the future.
    begins_at: int = -1
    shard: int = 0  # its number among `shards`
    shards: int = 1  # among which the partitions of rollouts are divided
    # by env, where it is not the policy gradient alone: what trains its rollouts
    losses: dict[str, LossWeights] = field(default_factory=dict[str, LossWeights])

    def for_env(self, env: str) -> BufferConfig:
        """This configuration with the rules that the env has for itself."""
        return replace(self, **self.own[env]) if env in self.own else self


class OpenGroup(msgspec.Struct):
    """A group that waits for its rollouts."""

    opened: int  # the newest announced version at the time
    problem_id: str
    producer: str  # empty: the group was counted before
    partition: int
    epoch: int = 0
    members: list[Event] = []
    # Rollouts that have come and cannot be trained on: they count towards its size.
    lost: int = 0
    open_sessions: int | None = None  # as its last rollout has it
    # The first version whose announcement may change anything: a member gets too old, or is of a
    # version that is announced by then, or the group has waited for too long.
    next_check_version: int = 0
    refused: dict[str, None] = {}  # uids of the lost ones that may be put back
    last_rollout_s: float = 0.0  # when a rollout was last added to it, or lost; by the awake clock

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout_of(event) for event in self.members]

    @property
    def size(self) -> int:
        """Rollouts that have come, whatever their end."""
        return len(self.members) + self.lost

    def is_complete(self, version: int, rules: BufferConfig) -> bool:
        """Whether the group closes without waiting for more rollouts: `group_size` of them have
        come, or it has been open for longer than ids are remembered. Not before all versions of its
        members are announced.
        """
        is_forgotten = version - self.opened > rules.remember_versions
        return (self.size >= rules.group_size or is_forgotten) and self.is_announced(version)

    def would_expire(self, version: int, rules: BufferConfig) -> bool:
        """Whether the group can be trained on now, and the version after this one would make some
        of its members too old.

        This is asked when a version is announced. It is not asked when a rollout arrives, because
        the next record may be another rollout of the group.
        """
        if len(self.members) < rules.min_group_size or not self.is_announced(version):
            return False
        return any(
            expires_next(version, rollout.policy_version, rules.max_age)
            for rollout in self.rollouts
        )

    def is_announced(self, version: int) -> bool:
        """Whether all versions that sampled its members are announced. Until then the group cannot
        be trained on.
        """
        return all(rollout.newest_policy_version <= version for rollout in self.rollouts)

    def waits_for_sessions(self, rules: BufferConfig) -> bool:
        """Whether sessions of the group are open or wait for rewards, as far as is known."""
        return rules.session_wait_s > 0 and self.open_sessions != 0

    def wait_s(self, rules: BufferConfig) -> float:
        """How long it waits after a rollout for the next one if it has its minimum size."""
        if self.waits_for_sessions(rules):
            return max(rules.session_wait_s, rules.group_wait_s)
        return rules.group_wait_s


def open_group(event: Event, rollout: Rollout, version: int) -> OpenGroup:
    """A group without members that begins with this rollout, at this announced version."""
    return OpenGroup(
        opened=version,
        problem_id=rollout.problem_id,
        producer=rollout.producer,
        partition=event.partition,
        epoch=rollout.epoch,
    )


class Window(msgspec.Struct):
    """The open groups of one env, bounded by age, tokens and bytes."""

    open: dict[str, OpenGroup] = {}
    tokens: int = 0
    intake: IntakeStats = msgspec.field(default_factory=IntakeStats)
    bytes: int = 0  # of the members' records
    # uid -> the newest announced version when it came. The oldest come first.
    seen: dict[str, int] = {}
    closed: dict[str, int] = {}  # group -> the newest announced version when it closed
    # Groups that have closed although rollouts of them may still come, the last COUNTED_GROUPS. If
    # one of them opens again, its end is not counted for its producer a second time.
    counted: dict[str, None] = {}

    def note_seen(self, uid: str, version: int) -> None:
        """Remember that this rollout came at this version."""
        self.seen[uid] = version
        drop_oldest(self.seen, REMEMBERED_IDS)

    def note_closed(self, group_id: str, version: int) -> None:
        """Remember that this group closed at this version."""
        self.closed[group_id] = version
        drop_oldest(self.closed, REMEMBERED_IDS)

    def note_counted(self, group_id: str) -> None:
        """Remember that the end of this group has been counted."""
        self.counted[group_id] = None
        drop_oldest(self.counted, COUNTED_GROUPS)

    def add_rollout(
        self,
        event: Event,
        rollout: Rollout,
        outcome: Outcome,
        version: int,
        awake_s: float,
        rules: BufferConfig,
    ) -> OpenGroup | None:
        """Give a rollout that has come its place in its group, as a member or as a lost rollout,
        and return the group. None if the group has closed, or if the rollout has come before.

        `version`: the newest announced one. `awake_s`: the time by the awake clock.
        """
        uid = rollout.rollout_uid
        is_refused = outcome == "refused"
        if uid in self.seen:
            return None
        if not is_refused:
            self.note_seen(uid, version)
            self.intake.add(rollout, rollout.total_tokens)
        if rollout.group_id in self.closed:
            return None
        group = self.open.get(rollout.group_id)
        if group is None:
            group = open_group(event, rollout, version)
            if rollout.group_id in self.counted:
                group.producer = ""
            group.next_check_version = version + rules.remember_versions + 1
            self.open[rollout.group_id] = group
        group.last_rollout_s = awake_s
        group.open_sessions = rollout.open_sessions
        if uid in group.refused:
            if is_refused:
                return group  # it is counted already
            del group.refused[uid]  # it was requeued from the dead letters
            group.lost -= 1
        if outcome == "held":
            self.hold(group, event, rollout, version, rules.max_age)
        else:
            group.lost += 1
        if is_refused:
            group.refused[uid] = None
        return group

    def hold(
        self, group: OpenGroup, event: Event, rollout: Rollout, version: int, max_age: int
    ) -> None:
        """Add a rollout that can be trained on to the members of its group."""
        # The buffer does not use the metadata, and its objects may take 70 times its bytes.
        if rollout.metadata:
            msgspec.structs.force_setattr(rollout, "metadata", {})
        group.members.append(event)
        self.tokens += rollout.total_tokens
        self.bytes += record_bytes(event)
        check_version = version + 1
        if rollout.newest_policy_version <= version:
            check_version = rollout.policy_version + max_age
        group.next_check_version = min(group.next_check_version, check_version)

    def lose(self, group: OpenGroup, events: Sequence[Event]) -> None:
        """Take these members out of the group, which counts them as lost."""
        gone = dict.fromkeys(events)
        group.members = [event for event in group.members if event not in gone]
        group.lost += len(events)
        self.tokens -= sum(rollout_of(event).total_tokens for event in events)
        self.bytes -= sum(record_bytes(event) for event in events)

    def close(self, group_id: str, version: int, group_size: int) -> OpenGroup:
        """Take the group out of the window, and remember that it closed at this version. Returns
        the group with its members.
        """
        group = self.open.pop(group_id)
        self.tokens -= sum(rollout.total_tokens for rollout in group.rollouts)
        self.bytes -= sum(record_bytes(event) for event in group.members)
        # If all of them were refused, they may be requeued from the dead letters and open it again.
        if group.size > len(group.refused):
            self.note_closed(group_id, version)
        if group.refused or group.size < group_size:
            self.note_counted(group_id)
        return group

    def recount(self) -> None:
        """Set `tokens` and `bytes` to what the open groups have."""
        members = [event for group in self.open.values() for event in group.members]
        self.tokens = sum(rollout_of(event).total_tokens for event in members)
        self.bytes = sum(record_bytes(event) for event in members)

    def is_full(self, config: BufferConfig) -> bool:
        if self.tokens >= config.max_window_tokens:
            return True
        return self.bytes >= config.max_window_tokens * BYTES_PER_TOKEN

    def idle_groups(self, rules: BufferConfig, version: int, clock: AwakeClock) -> list[str]:
        """The open groups to which nothing has been added for as long as they wait. Where fewer
        than `min_group_size` rollouts can be trained on, that is PATIENCE times `group_wait_s` at
        least.
        """
        idle = list[str]()
        for group_id, group in self.open.items():
            wait_s = group.wait_s(rules)
            if not clock.has_waited(group.last_rollout_s, wait_s):
                continue
            usable = sum(rollout.newest_policy_version <= version for rollout in group.rollouts)
            patience_s = max(wait_s, rules.group_wait_s * PATIENCE)
            if usable >= rules.min_group_size or clock.has_waited(group.last_rollout_s, patience_s):
                idle.append(group_id)
        return idle


def drop_oldest(memory: dict[str, Any], most: int) -> None:
    """Drop what came first until there are no more than `most` entries."""
    while len(memory) > most:
        del memory[next(iter(memory))]


class BufferState(msgspec.Struct):
    version: int = -1  # the newest announced version; -1: none yet
    vocab_size: int = 0  # of the policy, as announced; 0: not known
    windows: dict[str, Window] = {}
    clock: AwakeClock = msgspec.field(default_factory=AwakeClock)
    # when it was last checked how long the open groups have waited; by the clock
    checked_s: float = 0.0
    # By env: the groups, without their members, that were open when the env was taken out of the
    # run, or of which rollouts have come since. Its producers are owed an end of each when it is
    # put back.
    groups_of_removed_envs: dict[str, dict[str, OpenGroup]] = {}


def record_bytes(event: Event) -> int:
    """Bytes of memory that a held rollout takes. Its arrays are views of its record's bytes.
    Headers, and the elements of lists and maps, are objects in addition to these.
    """
    held = len(event.value or b"")
    for name, value in event.headers:
        held += len(name) + len(value) + OBJECT_BYTES
    rollout = rollout_of(event)
    objects = len(rollout.turns) + len(rollout.rewards)
    for turn in rollout.turns:
        objects += len(turn.rewards)
        if turn.inference_metadata is not None:
            objects += len(turn.inference_metadata.version_spans)
    return held + OBJECT_BYTES * objects
