"""EnvGroups: how the rollouts of an env become groups, and when a group closes. Each rollout leaves
in a closed group, or by a fate of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.buffer.advantages import advantage_named
from streamrl.buffer.groups import POLICY_GRADIENT, empty_group, rollout_of, trains, try_score
from streamrl.buffer.staleness import is_fresh
from streamrl.buffer.state import BufferConfig, BufferState, OpenGroup, Window, record_bytes
from streamrl.buffer.validation import foreign_token, refusal
from streamrl.config import topology
from streamrl.stream.log.chunks import record_limit
from streamrl.stream.log.dead_letters import printable, to_dead_letter
from streamrl.stream.log.protocol import Event, Offsets, Output
from streamrl.stream.records import ENV_REMOVED, Fate, FateKind, Rollout, ScoredGroup
from streamrl.stream.records.fields import size_bound


class EnvGroups:
    """The groups of one env in one step of the buffer, under the rules of the env. It changes the
    state and appends to the outputs of the step.
    """

    def __init__(
        self,
        env: str,
        rules: BufferConfig,
        state: BufferState,
        outputs: list[Output],
    ) -> None:
        self.env = env
        self.rules = rules
        self.state = state
        self.outputs = outputs
        # It becomes part of the state with the env's first rollout.
        self.window = state.windows.get(env) or Window()

    # ---- events ------------------------------------------------------------------------------

    def on_policy_version(self, version: int) -> None:
        """Expire what has become too old, and close what could not wait for another version."""
        for group_id, group in list(self.window.open.items()):
            if group.next_check_version > version:
                continue
            self.expire_old(group_id)
            self.maybe_close(group_id, expires=group.would_expire(version, self.rules))
            # a group that is still open is near its end
            group.next_check_version = version + 1

    def on_rollout(self, event: Event, rollout: Rollout) -> None:
        """A rollout has come: it joins its group, or meets its end."""
        state = self.state
        rules = self.rules
        group_id = rollout.group_id
        cause = refusal(event, rollout, self.env, rules, state)
        if cause:
            self.refuse(event, rollout, cause)
            return
        if self.is_known(rollout.rollout_uid):
            self.record_fate("duplicate", [event])
            return
        window = state.windows.setdefault(self.env, self.window)
        window.note_seen(rollout.rollout_uid, state.version)
        tokens = rollout.total_tokens
        window.intake.add(rollout, tokens)
        if rollout.misaligned:
            self.outputs += to_dead_letter(event, rollout.misaligned)
        if self.is_closed(group_id):
            if not rollout.misaligned:
                self.record_fate("filtered", [event], "late for its group")
            return
        group = self.get_or_open_group(event, rollout)
        if rollout.rollout_uid in group.refused:  # it was put back from the dead letters
            del group.refused[rollout.rollout_uid]
            group.lost -= 1
        if rollout.misaligned:
            group.lost += 1
        elif rollout.failure:
            self.record_fate("failed", [event], printable(rollout.failure))
            group.lost += 1
        elif not self.is_fresh(rollout):
            self.record_fate("expired", [event])
            group.lost += 1
        else:
            self.add_member(group, event, rollout, tokens)
        self.maybe_close(group_id)
        self.evict_oldest(newest=group_id)

    def refuse(self, event: Event, rollout: Rollout, cause: str) -> None:
        """Put the rollout aside. Its group counts it as lost, so that it can close."""
        self.outputs += to_dead_letter(event, cause)
        if self.is_closed(rollout.group_id) or self.is_known(rollout.rollout_uid):
            return
        self.state.windows.setdefault(self.env, self.window)
        group = self.get_or_open_group(event, rollout)
        if rollout.rollout_uid not in group.refused:
            group.refused[rollout.rollout_uid] = None
            group.lost += 1
        self.maybe_close(rollout.group_id)

    def refuse_foreign_tokens(self) -> None:
        """The vocabulary has become known: refuse the rollouts that came before and have token ids
        outside of it.
        """
        for group_id, group in self.window.open.items():
            for event in list(group.members):
                cause = foreign_token(rollout_of(event), self.state.vocab_size)
                if cause:
                    self.outputs += to_dead_letter(event, cause)
                    self.window.lose(group_id, [event])
                    group.refused[rollout_of(event).rollout_uid] = None
                    group.next_check_version = self.state.version

    def expire_removed(self, removed: Offsets) -> None:
        """Expire the members whose records retention has deleted: those below these offsets."""
        for group_id, group in list(self.window.open.items()):
            gone = [
                event
                for event in group.members
                if event.offset < removed.get((event.topic, event.partition), 0)
            ]
            if not gone:
                continue
            record = Fate(
                fate="expired",
                environment=self.env,
                partition=group.partition,
                offsets=np.array([event.offset for event in gone], np.int64),
                cause="retention has deleted it before it was used",
            )
            self.outputs.append(Output(topology.FATES, group_id, record))
            group.members = [event for event in group.members if event not in gone]
            group.lost += len(gone)
            if self.env in self.rules.envs:
                self.maybe_close(group_id)
        self.window.recount()

    def begin_epoch(self) -> None:
        """Tell the batcher that retention has deleted rollouts of the env that were not read: no
        group of theirs will close.
        """
        self.publish("", empty_group(self.env, "", "", "", 0, begins_epoch=True))

    def remove(self) -> None:
        """The env was taken out of the run: everything that is held of it is filtered.

        Its topics may not be read or written now, so the ends of its groups are published when it
        is put back.
        """
        del self.state.windows[self.env]
        for group_id, group in self.window.open.items():
            if group.members:
                self.record_fate("filtered", group.members, ENV_REMOVED)
            group.members = []
            self.state.groups_of_removed_envs.setdefault(self.env, {})[group_id] = group
        self.window = Window()

    def restore(self) -> None:
        """The env was put back: the groups that were open when it left are over, and its producers
        may begin as many others.
        """
        window = self.state.windows.setdefault(self.env, self.window)
        for group_id, group in self.state.groups_of_removed_envs.pop(self.env).items():
            window.note_closed(group_id, self.state.version)
            self.publish(group_id, self.empty_record(group_id, group))

    # ---- what a rollout is to its group ------------------------------------------------------

    def get_or_open_group(self, event: Event, rollout: Rollout) -> OpenGroup:
        """The open group of a rollout that has just come, a new one if it is the first."""
        group = self.window.open.get(rollout.group_id)
        if group is None:
            group = OpenGroup(
                opened=self.state.version,
                problem_id=rollout.problem_id,
                producer="" if rollout.group_id in self.window.counted else rollout.producer,
                partition=event.partition,
                epoch=rollout.epoch,
                next_check_version=self.state.version + self.rules.remember_versions + 1,
            )
            self.window.open[rollout.group_id] = group
        group.last_rollout_s = self.state.clock.awake_s
        group.open_sessions = rollout.open_sessions
        return group

    def add_member(self, group: OpenGroup, event: Event, rollout: Rollout, tokens: int) -> None:
        """Hold a rollout that can be trained on. `tokens`: of all its turns."""
        # Nobody asks for the metadata here, and its objects may take 70 times its bytes.
        if rollout.metadata:
            msgspec.structs.force_setattr(rollout, "metadata", {})
        group.members.append(event)
        self.window.tokens += tokens
        self.window.bytes += record_bytes(event)
        check_version = self.state.version + 1
        if rollout.newest_policy_version <= self.state.version:
            check_version = rollout.policy_version + self.rules.max_age
        group.next_check_version = min(group.next_check_version, check_version)

    def is_known(self, uid: str) -> bool:
        """Has a rollout of the env with this id come before?"""
        return uid in self.window.seen

    def is_closed(self, group_id: str) -> bool:
        return group_id in self.window.closed

    def is_fresh(self, rollout: Rollout) -> bool:
        """May the batch of the newest announced version, or a later one, still take it?"""
        return is_fresh(self.state.version, rollout.policy_version, self.rules.max_age)

    def expire_old(self, group_id: str) -> None:
        """Take out the members that have become too old."""
        members = self.window.open[group_id].members
        old = [event for event in members if not self.is_fresh(rollout_of(event))]
        if old:
            self.record_fate("expired", old)
            self.window.lose(group_id, old)

    # ---- when a group closes -----------------------------------------------------------------

    def maybe_close(self, group_id: str, expires: bool = False) -> None:
        """Close the group if it is complete, or if it would expire, or if it has been open for
        longer than ids are remembered.
        """
        version = self.state.version
        group = self.window.open[group_id]
        forgotten = version - group.opened > self.rules.remember_versions
        if not (group.size >= self.rules.group_size or expires or forgotten):
            return
        # a group with a rollout of a later version is held until that version is announced
        if group.is_announced(version):
            self.close_group(group_id)

    def close_idle(self) -> None:
        """Close the groups to which nothing has been added for long (`Window.idle_groups`)."""
        state = self.state
        for group_id in self.window.idle_groups(self.rules, state.version, state.clock):
            self.close_incomplete(group_id)

    def evict_oldest(self, newest: str) -> None:
        """A full window closes its oldest groups at their minimum size, rather than wait for
        rollouts that it will not read.

        If that is not enough it goes on with groups below their minimum, but not with the `newest`:
        only what the buffer reads next can complete a group, so it has to read on.
        """
        window = self.window
        rules = self.rules
        if not window.is_full(rules):
            return
        for group_id, group in list(window.open.items()):
            if not window.is_full(rules):
                return
            is_large_enough = len(group.members) >= rules.min_group_size
            if is_large_enough and group.is_announced(self.state.version):
                self.close_group(group_id)
        for group_id in list(window.open):
            if not window.is_full(rules):
                return
            if group_id != newest:
                window.intake.crowded_out += 1
                self.close_incomplete(group_id)

    def close_incomplete(self, group_id: str) -> None:
        """Close the group with what it has. Rollouts of a version that nobody has announced cannot
        be trained on, and are refused.
        """
        newest = self.state.version
        for event in list(self.window.open[group_id].members):
            version = rollout_of(event).newest_policy_version
            if version > newest:
                waited = f"policy version {version} was not announced while its group waited"
                self.outputs += to_dead_letter(event, f"{waited}; the newest is {newest}")
                self.window.lose(group_id, [event])
        self.close_group(group_id)

    def close_group(self, group_id: str) -> None:
        """Score the group and publish it. It is published empty when too few rollouts are left."""
        window = self.window
        group = window.open[group_id]
        members = group.members
        window.lose(group_id, members)
        del window.open[group_id]
        # a group that was refused as a whole may be put back from the dead letters
        if group.size > len(group.refused):
            window.note_closed(group_id, self.state.version)
        if group.refused or group.size < self.rules.group_size:
            window.note_counted(group_id)
        record, cause = self.score(members)
        if record is None:
            record = self.empty_record(group_id, group)
            if members:
                self.record_fate("filtered", members, cause)
        if record.producer != group.producer:
            record = msgspec.structs.replace(record, producer=group.producer)
        self.publish(group_id, record)

    def score(self, members: Sequence[Event]) -> tuple[ScoredGroup | None, str]:
        """The scored group of these members, or None and why there is nothing to train on."""
        rules = self.rules
        if len(members) < rules.min_group_size:
            return None, "group below its minimum size"
        scored, cause = try_score(
            members,
            advantage_named(rules.advantage),
            rules.losses.get(self.env, POLICY_GRADIENT),
        )
        if scored is None:
            self.window.intake.unscored = cause
        elif (size := size_bound(scored)) > record_limit(topology.GROUPS):
            return None, f"group larger than a record: {size:,} bytes; lower group_size or lengths"
        elif not trains(scored):
            self.window.intake.flat_groups += 1
            if rules.zero_advantage == "filter":
                return None, "group whose advantages are all 0"
        return scored, cause

    # ---- outputs -----------------------------------------------------------------------------

    def publish(self, group_id: str, record: ScoredGroup) -> None:
        self.outputs.append(Output(topology.groups(self.env), group_id, record))

    def empty_record(self, group_id: str, group: OpenGroup) -> ScoredGroup:
        """Says that the group is over and has nothing to train on."""
        return empty_group(
            self.env, group_id, group.problem_id, group.producer, group.partition, group.epoch
        )

    def record_fate(self, fate: FateKind, events: Sequence[Event], cause: str = "") -> None:
        """Publish the fate of these rollouts of one group."""
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
