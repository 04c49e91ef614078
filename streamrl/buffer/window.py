"""What the buffer holds, and how each rollout leaves it: in a closed group, or by a fate of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import msgspec
import numpy as np

from streamrl.buffer import groups
from streamrl.buffer.advantages import Advantage, informative
from streamrl.buffer.freshness import FUTURE_VERSIONS, fresh, last_chance
from streamrl.buffer.groups import rollout_of
from streamrl.buffer.intake import Intake, objection
from streamrl.records import Fate, FateKind, Metric, Rollout
from streamrl.stream.dead_letters import reject
from streamrl.stream.log import Event, Output, Positions

LEFT = "its env was taken out of the run"


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


class OpenGroup(msgspec.Struct):
    """A group that waits for its rollouts."""

    opened: int  # version heard at the time
    problem_id: str
    producer: str
    partition: int
    members: list[Event] = []
    lost: int = 0  # rollouts that failed, expired or were misaligned: they count towards its size
    look_at: int = 0  # the version that may first change anything about it: a member is old, or heard of; or it has waited too long

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout_of(event) for event in self.members]


class Window(msgspec.Struct):
    """What one env has in flight here: bounded by age and by tokens."""

    open: dict[str, OpenGroup] = {}
    tokens: int = 0
    intake: Intake = msgspec.field(default_factory=Intake)


class State(msgspec.Struct):
    version: int = -1  # newest heard; -1: none yet
    vocab_size: int = 0  # of the policy, as announced; 0: not said
    windows: dict[str, Window] = {}
    seen: dict[str, int] = {}  # uid -> version heard when it came; in that order, so the oldest come first
    closed: dict[str, int] = {}  # group -> version heard when it closed


@dataclass
class Fold:
    """One step at work: the state, and what comes out."""

    rules: Rules
    state: State
    outputs: list[Output] = field(default_factory=list[Output])

    def hear(self, version: int, vocab_size: int, time_s: float) -> None:
        """A new policy version: forget what is long over, drop what has become too old, close what could not wait for another."""
        state, horizon = self.state, version - self.rules.remember_versions
        state.version, state.vocab_size = version, vocab_size
        for memory in (state.seen, state.closed):
            for old in [name for name, _ in takewhile(lambda item: item[1] < horizon, memory.items())]:
                del memory[old]
        values = dict[str, float]()
        for env, window in state.windows.items():
            for group_id, group in [item for item in window.open.items() if item[1].look_at <= version]:
                self.expire(window, group_id)
                self.settle(env, window, group_id, ages_out=self.ages_out(group))
                group.look_at = version + 1  # if it is still there, it is near its end
            values |= window.intake.values(env)
            window.intake = Intake()
        if values:
            self.outputs.append(Output("metrics", "buffer", Metric(source="buffer", time_s=time_s, step=version, values=values)))

    def take(self, event: Event, rollout: Rollout) -> None:
        """A rollout has come: it joins its group, or meets its end."""
        state, env, uid, group_id = self.state, event.topic.partition(".")[2], rollout.rollout_uid, rollout.group_id
        if cause := objection(rollout, event.key, env, state.version + self.rules.ahead, state.vocab_size):
            self.outputs += reject(event, cause)
            return
        if uid in state.seen:
            self.end("duplicate", [event])
            return
        state.seen[uid] = state.version
        window = state.windows.setdefault(env, Window())
        tokens = groups.total_tokens(rollout)
        window.intake.count(rollout, tokens)
        if rollout.misaligned:
            self.outputs += reject(event, rollout.misaligned)
        if group_id in state.closed:
            if not rollout.misaligned:
                self.end("filtered", [event], "late for its group")
            return
        group = window.open.get(group_id)
        if group is None:
            forgotten = state.version + self.rules.remember_versions + 1
            group = OpenGroup(state.version, rollout.problem_id, rollout.producer, event.partition, look_at=forgotten)
            window.open[group_id] = group
        if rollout.misaligned:
            group.lost += 1
        elif rollout.failure:
            self.end("failed", [event], rollout.failure)
            group.lost += 1
        elif not self.fresh(rollout):
            self.end("expired", [event])
            group.lost += 1
        else:
            group.members.append(event)
            window.tokens += tokens
            heard = rollout.newest_policy_version <= state.version
            group.look_at = min(group.look_at, rollout.policy_version + self.rules.max_age if heard else state.version + 1)
        self.settle(env, window, group_id)
        self.relieve(env, window)

    def fresh(self, rollout: Rollout) -> bool:
        """May batch number `version`, or a later one, still take it?"""
        return fresh(self.state.version, rollout.policy_version, self.rules.max_age)

    def expire(self, window: Window, group_id: str) -> None:
        """Take out the members that have become too old."""
        group = window.open[group_id]
        if old := [event for event in group.members if not self.fresh(rollout_of(event))]:
            self.end("expired", old)
            group.members = [event for event in group.members if self.fresh(rollout_of(event))]
            group.lost += len(old)
            window.tokens -= sum(groups.total_tokens(rollout_of(event)) for event in old)

    def settle(self, env: str, window: Window, group_id: str, ages_out: bool = False) -> None:
        """Close the group if it is complete, or ages out, or has been waiting for longer than anything is remembered."""
        rules, version, group = self.rules, self.state.version, window.open[group_id]
        complete = len(group.members) + group.lost >= rules.group_size
        if not (complete or ages_out or version - group.opened > rules.remember_versions):
            return
        if all(rollout.newest_policy_version <= version for rollout in group.rollouts):  # otherwise held until that version is heard of
            self.close(env, window, group_id)

    def ages_out(self, group: OpenGroup) -> bool:
        """Has it enough members, some of which the next version would make too old? Asked when a version is announced, not when a rollout comes:
        the rest of its group may be right behind it."""
        old = any(last_chance(self.state.version, rollout.policy_version, self.rules.max_age) for rollout in group.rollouts)
        return old and len(group.members) >= self.rules.min_group_size

    def relieve(self, env: str, window: Window) -> None:
        """A full window closes its oldest groups at their minimum, rather than wait for rollouts that it will not read."""
        if window.tokens < self.rules.max_window_tokens:
            return
        for group_id, group in list(window.open.items()):
            if window.tokens < self.rules.max_window_tokens:
                return
            heard = all(rollout.newest_policy_version <= self.state.version for rollout in group.rollouts)
            if heard and len(group.members) >= self.rules.min_group_size:
                self.close(env, window, group_id)

    def close(self, env: str, window: Window, group_id: str) -> None:
        """The group is over: scored and published, or published empty when too few are left of it."""
        group = window.open.pop(group_id)
        self.state.closed[group_id] = self.state.version
        window.tokens -= sum(groups.total_tokens(rollout) for rollout in group.rollouts)
        scored = groups.score(group.members, self.rules.advantage) if len(group.members) >= self.rules.min_group_size else None
        flat = scored is not None and not informative(scored.advantages)
        window.intake.flat_groups += flat
        if scored is None and group.members:
            self.end("filtered", group.members, "group below its minimum size")
        if flat and self.rules.zero_advantage == "filter":
            self.end("filtered", group.members, "group whose advantages are all 0")
            scored = None
        record = scored or groups.nothing(env, group_id, group.problem_id, group.producer, group.partition)
        self.outputs.append(Output(f"groups.{env}", group_id, record))

    def expire_removed(self, env: str, removed: Positions) -> None:
        """End the members whose records retention has deleted: they lie below these offsets."""
        window = self.state.windows[env]
        for group_id, group in list(window.open.items()):
            gone = [event for event in group.members if event.offset < removed.get((event.topic, event.partition), 0)]
            if not gone:
                continue
            offsets = np.array([event.offset for event in gone], np.int64)
            cause = "retention has deleted it before it was used"
            record = Fate(fate="expired", environment=env, partition=group.partition, offsets=offsets, cause=cause)
            self.outputs.append(Output("fates", group_id, record))
            group.members = [event for event in group.members if event not in gone]
            group.lost += len(gone)
            self.settle(env, window, group_id)
        window.tokens = sum(groups.total_tokens(rollout) for group in window.open.values() for rollout in group.rollouts)

    def leave(self, env: str) -> None:
        """The env was taken out of the run: what is held of it ends."""
        for group_id, group in self.state.windows.pop(env).open.items():
            self.state.closed[group_id] = self.state.version
            if group.members:
                self.end("filtered", group.members, LEFT)

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
        self.outputs.append(Output("fates", first.group_id, record))
