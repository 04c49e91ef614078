"""What the buffer holds, and how each rollout leaves it: in a closed group, or by a fate of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import msgspec
import numpy as np

from streamrl.buffer import groups
from streamrl.buffer.advantages import Advantage, informative
from streamrl.buffer.groups import rollout_of
from streamrl.buffer.staleness import FUTURE_VERSIONS, fresh, last_chance
from streamrl.buffer.validation import Intake, foreign_token, objection, unsound
from streamrl.config import topology
from streamrl.log.dead_letters import printable, text_of, to_dead_letter
from streamrl.log.protocol import Event, Offsets, Output
from streamrl.records import Fate, FateKind, Metric, Rollout, ScoredGroup

LEFT = "its env was taken out of the run"
LOOK_S = 1.0  # the open groups are asked so often how long they have waited
PATIENCE = 10  # times `group_wait_s` that a group below its minimum waits
# of a window's records, at most: ids and logprobs are 8, and the text of a token about as many
BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class Rules:
    """When a group closes and how long it is known."""

    group_size: int
    min_group_size: int
    max_age: int
    max_window_tokens: int
    remember_versions: int
    advantage: Advantage
    zero_advantage: Literal["keep", "filter"] = "keep"
    ahead: int = FUTURE_VERSIONS  # versions
    version: int = 0  # of these rules (`process.Config.rules_version`)
    group_wait_s: float = 60.0  # see `quiet_groups`
    max_seq_len: int = 0  # tokens; 0: not said
    partitions: int = 0  # of rollouts.<env>; 0: not said


class OpenGroup(msgspec.Struct):
    """A group that waits for its rollouts."""

    opened: int  # version heard at the time
    problem_id: str
    producer: str
    partition: int
    members: list[Event] = []
    lost: int = 0  # rollouts that failed, expired or were misaligned: they count towards its size
    # the version that may first change anything about it: a member is old, or heard of; or it has
    # waited too long
    look_at: int = 0
    refused: int = 0  # of the lost ones
    last_s: float = -1.0  # when a rollout was last added to it, or lost; -1: not noted

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout_of(event) for event in self.members]


class Window(msgspec.Struct):
    """What one env has in flight here: bounded by age and by tokens."""

    open: dict[str, OpenGroup] = {}
    tokens: int = 0
    intake: Intake = msgspec.field(default_factory=Intake)
    bytes: int = 0  # of the members' records
    # uid -> version heard when it came; in that order, so the oldest come first
    seen: dict[str, int] = {}
    closed: dict[str, int] = {}  # group -> version heard when it closed

    def lose(self, group_id: str, events: Sequence[Event]) -> None:
        """These members have met their end: their group counts them as lost."""
        group, gone = self.open[group_id], dict.fromkeys(events)
        group.members = [event for event in group.members if event not in gone]
        group.lost += len(events)
        self.tokens -= sum(rollout_of(event).total_tokens for event in events)
        self.bytes -= sum(size_of(event) for event in events)


class State(msgspec.Struct):
    version: int = -1  # newest heard; -1: none yet
    vocab_size: int = 0  # of the policy, as announced; 0: not said
    windows: dict[str, Window] = {}
    seen: dict[str, int] = {}  # by the rules of version 0: as a window's
    closed: dict[str, int] = {}
    looked_s: float = 0.0  # when the open groups were last asked how long they have waited
    # open groups of envs that were taken out, without their members: their producers are owed an
    # end of each when the env is put back
    left: dict[str, dict[str, OpenGroup]] = {}


@dataclass
class Fold:
    """One step at work: the state, and what comes out."""

    rules: Rules  # of the envs that have none of their own
    state: State
    time_s: float = 0.0
    own_rules: Mapping[str, Rules] = field(default_factory=dict[str, Rules])  # by env
    outputs: list[Output] = field(default_factory=list[Output])

    def rules_of(self, env: str) -> Rules:
        return self.own_rules.get(env, self.rules)

    def hear(self, version: int, vocab_size: int) -> None:
        """A new policy version: forget what is long over, drop what has become too old, close what
        could not wait for another.
        """
        state, horizon = self.state, version - self.rules.remember_versions
        news = vocab_size and vocab_size != state.vocab_size and self.rules.version >= 2
        state.version, state.vocab_size = version, vocab_size
        if news:
            self.refuse_foreign_tokens()
        for memory in (
            state.seen,
            state.closed,
            *(
                memory
                for window in state.windows.values()
                for memory in (window.seen, window.closed)
            ),
        ):
            for old in [
                name for name, _ in takewhile(lambda item: item[1] < horizon, memory.items())
            ]:
                del memory[old]
        values = dict[str, float]()
        for env, window in state.windows.items():
            for group_id, group in [
                item for item in window.open.items() if item[1].look_at <= version
            ]:
                self.expire(env, window, group_id)
                self.settle(env, window, group_id, ages_out=self.ages_out(env, group))
                group.look_at = version + 1  # if it is still there, it is near its end
            values |= window.intake.values(env)
            window.intake = Intake()
        if values:
            self.outputs.append(
                Output(
                    topology.METRICS,
                    "buffer",
                    Metric(source="buffer", time_s=self.time_s, step=version, values=values),
                )
            )

    def refuse_foreign_tokens(self) -> None:
        """The vocabulary has become known: refuse the rollouts that came before and are not of it."""
        for window in self.state.windows.values():
            for group_id, group in window.open.items():
                for event in list(group.members):
                    cause = foreign_token(rollout_of(event), self.state.vocab_size)
                    if cause:
                        self.outputs += to_dead_letter(event, cause)
                        window.lose(group_id, [event])
                        group.refused += 1
                        group.look_at = self.state.version

    def take(self, event: Event, rollout: Rollout) -> None:
        """A rollout has come: it joins its group, or meets its end."""
        state, env, group_id = self.state, event.topic.partition(".")[2], rollout.group_id
        rules = self.rules_of(env)
        cause = objection(rollout, event.key, env, state.version + rules.ahead, state.vocab_size)
        if not cause and rules.version:
            cause = unsound(event, rollout, rules.max_seq_len, rules.partitions)
        if cause:
            self.outputs += to_dead_letter(event, cause)
            # so that its group can close
            if rules.version and not (
                self.is_closed(env, group_id) or self.is_known(env, rollout.rollout_uid)
            ):
                window = state.windows.setdefault(env, Window())
                group = self.opened(window, event, rollout)
                group.lost, group.refused = group.lost + 1, group.refused + 1
                self.settle(env, window, group_id)
            return
        if self.is_known(env, rollout.rollout_uid):
            self.end("duplicate", [event])
            return
        window = state.windows.setdefault(env, Window())
        (window.seen if rules.version else state.seen)[rollout.rollout_uid] = state.version
        tokens = rollout.total_tokens
        window.intake.count(rollout, tokens)
        if rollout.misaligned:
            self.outputs += to_dead_letter(event, rollout.misaligned)
        if self.is_closed(env, group_id):
            if not rollout.misaligned:
                self.end("filtered", [event], "late for its group")
            return
        group = self.opened(window, event, rollout)
        if rollout.misaligned:
            group.lost += 1
        elif rollout.failure:
            self.end(
                "failed", [event], printable(rollout.failure) if rules.version else rollout.failure
            )
            group.lost += 1
        elif not self.fresh(env, rollout):
            self.end("expired", [event])
            group.lost += 1
        else:
            # nobody asks for it here, and its objects may take 70 times its bytes
            msgspec.structs.force_setattr(rollout, "metadata", {})
            group.members.append(event)
            window.tokens += tokens
            window.bytes += size_of(event)
            heard = rollout.newest_policy_version <= state.version
            group.look_at = min(
                group.look_at,
                rollout.policy_version + rules.max_age if heard else state.version + 1,
            )
        self.settle(env, window, group_id)
        self.relieve(env, window, group_id)

    def opened(self, window: Window, event: Event, rollout: Rollout) -> OpenGroup:
        """The open group of this rollout, which has just been added to, or is new."""
        group = window.open.get(rollout.group_id)
        if group is None:
            forgotten = self.state.version + self.rules.remember_versions + 1
            group = OpenGroup(
                self.state.version,
                rollout.problem_id,
                rollout.producer,
                event.partition,
                look_at=forgotten,
            )
            window.open[rollout.group_id] = group
        group.last_s = self.time_s
        return group

    def is_known(self, env: str, uid: str) -> bool:
        """Has this rollout come before? Ids belong to their env; the rules of version 0 noted them
        for all envs together.
        """
        window = self.state.windows.get(env)
        return uid in self.state.seen or (window is not None and uid in window.seen)

    def is_closed(self, env: str, group_id: str) -> bool:
        window = self.state.windows.get(env)
        return group_id in self.state.closed or (window is not None and group_id in window.closed)

    def fresh(self, env: str, rollout: Rollout) -> bool:
        """May batch number `version`, or a later one, still take it?"""
        return fresh(self.state.version, rollout.policy_version, self.rules_of(env).max_age)

    def expire(self, env: str, window: Window, group_id: str) -> None:
        """Take out the members that have become too old."""
        if old := [
            event
            for event in window.open[group_id].members
            if not self.fresh(env, rollout_of(event))
        ]:
            self.end("expired", old)
            window.lose(group_id, old)

    def settle(self, env: str, window: Window, group_id: str, ages_out: bool = False) -> None:
        """Close the group if it is complete, or ages out, or has been waiting for longer than
        anything is remembered.
        """
        rules, version, group = self.rules_of(env), self.state.version, window.open[group_id]
        complete = len(group.members) + group.lost >= rules.group_size
        if not (complete or ages_out or version - group.opened > rules.remember_versions):
            return
        # otherwise held until that version is heard of
        if all(rollout.newest_policy_version <= version for rollout in group.rollouts):
            self.close(env, window, group_id)

    def ages_out(self, env: str, group: OpenGroup) -> bool:
        """Has it enough members, some of which the next version would make too old? Asked when a
        version is announced, not when a rollout comes: the rest of its group may be right behind
        it.
        """
        rules = self.rules_of(env)
        old = any(
            last_chance(self.state.version, rollout.policy_version, rules.max_age)
            for rollout in group.rollouts
        )
        return old and len(group.members) >= rules.min_group_size

    def close_quiet(self) -> None:
        """Close the groups that nothing has been added to for long: no version comes while the
        batch is short of them (`Rules.group_wait_s`).
        """
        state = self.state
        if not self.rules.version or 0 <= self.time_s - state.looked_s < LOOK_S:
            return
        state.looked_s = self.time_s
        for env, window in state.windows.items():
            for group in window.open.values():
                # an earlier version of the rules did not note it; a clock may be set back
                if group.last_s < 0 or group.last_s > self.time_s:
                    group.last_s = self.time_s
            for group_id in quiet_groups(self.rules_of(env), window, state.version, self.time_s):
                self.close_incomplete(env, window, group_id)

    def relieve(self, env: str, window: Window, newest: str) -> None:
        """A full window closes its oldest groups at their minimum, rather than wait for rollouts
        that it will not read.

        If that is not enough it goes on with those below their minimum, all but the `newest`: only
        what it reads next can complete a group, so it has to read on.
        """
        rules = self.rules_of(env)
        if not is_full(rules, window):
            return
        for group_id, group in list(window.open.items()):
            if not is_full(rules, window):
                return
            heard = all(
                rollout.newest_policy_version <= self.state.version for rollout in group.rollouts
            )
            if heard and len(group.members) >= rules.min_group_size:
                self.close(env, window, group_id)
        for group_id in list(window.open) if rules.version else ():
            if not is_full(rules, window):
                return
            if group_id != newest:
                window.intake.crowded_out += 1
                self.close_incomplete(env, window, group_id)

    def close_incomplete(self, env: str, window: Window, group_id: str) -> None:
        """Close the group with what it has; rollouts of a version that nobody has announced cannot
        be trained on.
        """
        for event in [
            event
            for event in window.open[group_id].members
            if rollout_of(event).newest_policy_version > self.state.version
        ]:
            version = rollout_of(event).newest_policy_version
            self.outputs += to_dead_letter(
                event,
                f"policy version {version} was not announced while its group waited; the newest is {self.state.version}",
            )
            window.lose(group_id, [event])
        self.close(env, window, group_id)

    def close(self, env: str, window: Window, group_id: str) -> None:
        """The group is over: scored and published, or published empty when too few are left of it."""
        rules, group = self.rules_of(env), window.open[group_id]
        members = group.members
        window.lose(group_id, members)
        del window.open[group_id]
        # one that was refused as a whole may be put back from the dead letters
        if group.lost > group.refused:
            (window.closed if rules.version else self.state.closed)[group_id] = self.state.version
        scored, cause = None, "group below its minimum size"
        if len(members) >= rules.min_group_size:
            scored, cause = score(members, rules.advantage)
            window.intake.unscored = window.intake.unscored if scored else cause
        if scored is None and members:
            self.end("filtered", members, cause)
        flat = scored is not None and not informative(scored.advantages)
        window.intake.flat_groups += flat
        if flat and rules.zero_advantage == "filter":
            self.end("filtered", members, "group whose advantages are all 0")
            scored = None
        record = scored or groups.nothing(
            env, group_id, group.problem_id, group.producer, group.partition
        )
        self.outputs.append(Output(topology.groups(env), group_id, record))

    def expire_removed(self, env: str, removed: Offsets) -> None:
        """End the members whose records retention has deleted: they lie below these offsets."""
        window = self.state.windows[env]
        for group_id, group in list(window.open.items()):
            gone = [
                event
                for event in group.members
                if event.offset < removed.get((event.topic, event.partition), 0)
            ]
            if not gone:
                continue
            offsets = np.array([event.offset for event in gone], np.int64)
            cause = "retention has deleted it before it was used"
            record = Fate(
                fate="expired",
                environment=env,
                partition=group.partition,
                offsets=offsets,
                cause=cause,
            )
            self.outputs.append(Output(topology.FATES, group_id, record))
            group.members = [event for event in group.members if event not in gone]
            group.lost += len(gone)
            self.settle(env, window, group_id)
        window.tokens = sum(
            rollout.total_tokens for group in window.open.values() for rollout in group.rollouts
        )
        window.bytes = sum(
            size_of(event) for group in window.open.values() for event in group.members
        )

    def leave(self, env: str) -> None:
        """The env was taken out of the run: what is held of it ends. Nobody may read or write its
        topics now, so by the rules of version 2 the ends of its groups are published later.
        """
        for group_id, group in self.state.windows.pop(env).open.items():
            if not self.rules.version:
                self.state.closed[group_id] = self.state.version
            if group.members:
                self.end("filtered", group.members, LEFT)
            if self.rules.version >= 2:
                group.members = []
                self.state.left.setdefault(env, {})[group_id] = group

    def come_back(self, env: str) -> None:
        """The env was put back: the groups that were open when it left are over, and its producers
        may begin as many others.
        """
        window = self.state.windows.setdefault(env, Window())
        for group_id, group in self.state.left.pop(env).items():
            window.closed[group_id] = self.state.version
            over = groups.nothing(env, group_id, group.problem_id, group.producer, group.partition)
            self.outputs.append(Output(topology.groups(env), group_id, over))

    def end(self, fate: FateKind, events: Sequence[Event], cause: str = "") -> None:
        """These rollouts of one group end here."""
        rollouts = [rollout_of(event) for event in events]
        first = rollouts[0]
        record = Fate(
            fate=fate,
            environment=first.environment,
            partition=events[0].partition,
            offsets=np.array([event.offset for event in events], np.int64),
            uids=[rollout.rollout_uid for rollout in rollouts],
            policy_versions=np.array([rollout.policy_version for rollout in rollouts], np.int32),
            cause=cause,
        )
        self.outputs.append(Output(topology.FATES, first.group_id, record))


def score(members: Sequence[Event], advantage: Advantage) -> tuple[ScoredGroup | None, str]:
    """The group of these members, or why there is none. An advantage function may be anybody's, and
    what it raises must not end the buffer.
    """
    try:
        return groups.score(members, advantage), ""
    except MemoryError:
        raise  # of this process, not of the group
    except Exception as error:
        return None, f"the group cannot be scored: {text_of(error)}"


def size_of(event: Event) -> int:
    """Bytes of a record that is held: its arrays are views of them."""
    return len(event.value) if event.value is not None else 0


def is_full(rules: Rules, window: Window) -> bool:
    if window.tokens >= rules.max_window_tokens:
        return True
    return rules.version > 0 and window.bytes >= rules.max_window_tokens * BYTES_PER_TOKEN


def quiet_groups(rules: Rules, window: Window, version: int, time_s: float) -> list[str]:
    """Open groups to which nothing was added for `group_wait_s`; for PATIENCE times as long where
    fewer than `min_group_size` can be trained on.
    """
    found = list[str]()
    for group_id, group in window.open.items():
        quiet_s = time_s - group.last_s
        if group.last_s < 0 or quiet_s < rules.group_wait_s:
            continue
        usable = sum(rollout.newest_policy_version <= version for rollout in group.rollouts)
        if usable >= rules.min_group_size or quiet_s >= rules.group_wait_s * PATIENCE:
            found.append(group_id)
    return found
