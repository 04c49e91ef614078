"""EnvGroups: the rollouts of one env become groups, and every group closes.

A rollout that arrives is judged (`arrival.py`). If it can be trained on, its group holds it.
Otherwise its fate is published at once, with a dead letter if it is refused or misaligned, and its
group counts it as lost, unless it is a duplicate or the group has closed. So a group is complete
when `group_size` rollouts have come, whatever became of them, or when it has been open for longer
than ids are remembered; in both cases not before all versions of its members are announced. It then
closes (`closing.py`): its members are scored against each other and published as one record. They
are filtered, and the published record is empty, if fewer than `min_group_size` are left, if they
cannot be scored, if the record would be too large, or, with `zero_advantage: filter`, if nothing
can be learned from them. Either record lets the env begin another group.

A group that does not become complete closes with the members that it has,

- when the next policy version would make some of them too old, and they are `min_group_size` at
  least, of announced versions (`on_policy_version`),
- when no rollout of it has come for `group_wait_s`, or longer while it waits for sessions; below
  `min_group_size` for ten times `group_wait_s` at least (`close_idle`),
- when the window is full: the oldest groups of the minimum size first, then the oldest ones below
  it (`evict_oldest`).

An example with group_size 4, min_group_size 2, max_age 1, lookahead 0, and version 5 as the newest.
Rollouts A and B were sampled by version 5: the group holds them. C has failed: its fate is
`failed`, and the group has 2 members and 1 lost rollout. Then version 6 is announced. A and B may
still be in batch 6 and would be too old for batch 7, so the group closes with A and B. If D comes
now, its fate is `filtered`, because it is late for its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.buffer.arrival import Arrival, arrival_of
from streamrl.buffer.closing import closed_group, empty_group, empty_record
from streamrl.buffer.groups import rollout_of
from streamrl.buffer.staleness import is_fresh
from streamrl.buffer.state import (
    COUNTED_GROUPS,
    BufferConfig,
    BufferState,
    OpenGroup,
    Window,
    drop_oldest,
    open_group,
)
from streamrl.buffer.validation import foreign_token
from streamrl.config import topology
from streamrl.stream.log.dead_letters import to_dead_letter
from streamrl.stream.log.protocol import Event, Offsets, Output
from streamrl.stream.records import (
    ENV_REMOVED,
    Fate,
    FateKind,
    Rollout,
    ScoredGroup,
    columns_of_fate,
)


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

    # ---- a rollout arrives -------------------------------------------------------------------

    def on_rollout(self, event: Event, rollout: Rollout) -> None:
        """Decide what becomes of the rollout, publish its fate if it has one, and close its group
        if it completes it.
        """
        state = self.state
        window = state.windows.setdefault(self.env, self.window)
        arrival = arrival_of(event, rollout, self.env, self.rules, state, window)
        group = window.add_rollout(
            event, rollout, arrival.outcome, state.version, state.clock.awake_s, self.rules
        )
        self.publish_arrival(event, arrival)
        if group is None:  # it has closed, or the rollout has come before
            return
        if group.is_complete(state.version, self.rules):
            self.close_group(rollout.group_id)
        # A refused record must not close the groups of others: anybody may have made its id up.
        if arrival.outcome != "refused":
            self.evict_oldest(newest=rollout.group_id)

    def publish_arrival(self, event: Event, arrival: Arrival) -> None:
        """Publish the fate of a rollout that its group does not hold."""
        match arrival.outcome:
            case "held":
                pass
            case "refused" | "misaligned":
                self.outputs += to_dead_letter(event, arrival.cause, env=self.env)
            case "late":
                self.record_fate("filtered", [event], arrival.cause)
            case "duplicate" | "failed" | "expired" as fate:
                self.record_fate(fate, [event], arrival.cause)

    # ---- a group closes ----------------------------------------------------------------------

    def on_policy_version(self) -> None:
        """A version was announced, `state.version`: expire the members that are too old now, and
        close the groups that cannot wait for another version.
        """
        version = self.state.version
        for group_id, group in list(self.window.open.items()):
            if group.next_check_version > version:
                continue
            self.expire_old(group)
            if group.is_complete(version, self.rules) or group.would_expire(version, self.rules):
                self.close_group(group_id)
            # A group that is still open is checked at every version from here on.
            group.next_check_version = version + 1

    def expire_old(self, group: OpenGroup) -> None:
        """Expire the members that neither the batch of the newest announced version nor a later one
        may take.
        """
        version = self.state.version
        max_age = self.rules.max_age
        old = [
            event
            for event in group.members
            if not is_fresh(version, rollout_of(event).policy_version, max_age)
        ]
        if old:
            self.record_fate("expired", old)
            self.window.lose(group, old)

    def close_idle(self) -> None:
        """Close the groups to which nothing has been added for long (`Window.idle_groups`)."""
        state = self.state
        for group_id in self.window.idle_groups(self.rules, state.version, state.clock):
            self.close_incomplete(group_id)

    def evict_oldest(self, newest: str) -> None:
        """Make room in a full window: close its oldest groups that have their minimum size.

        If that is not enough, close the oldest groups below their minimum as well, except the
        `newest` one. The rollouts that complete a group are in records that are still to be read,
        so a full window must not stop the buffer from reading.
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
        """Close the group with the members that it has. Members of a version that has not been
        announced cannot be trained on, and are dead-lettered.
        """
        group = self.window.open[group_id]
        newest = self.state.version
        for event in list(group.members):
            version = rollout_of(event).newest_policy_version
            if version > newest:
                waited = f"policy version {version} was not announced while its group waited"
                cause = f"{waited}; the newest is {newest}"
                self.outputs += to_dead_letter(event, cause, env=self.env)
                self.window.lose(group, [event])
        self.close_group(group_id)

    def close_group(self, group_id: str) -> None:
        """Take the group out of the window and publish its record, and the fate of its members if
        they cannot be trained on.
        """
        group = self.window.close(group_id, self.state.version, self.rules.group_size)
        closed = closed_group(self.env, group_id, group, self.rules)
        self.window.intake.zero_advantage_groups += closed.has_zero_advantage
        if closed.is_unscored:
            self.window.intake.unscored = closed.cause
        if closed.cause and group.members:
            self.record_fate("filtered", group.members, closed.cause)
        self.publish(group_id, closed.record)

    # ---- the vocabulary, retention, and envs that leave the run ------------------------------

    def refuse_foreign_tokens(self) -> None:
        """Dead-letter the held rollouts with token ids outside of the vocabulary, which has become
        known only now.
        """
        for group in self.window.open.values():
            for event in list(group.members):
                rollout = rollout_of(event)
                cause = foreign_token(rollout, self.state.vocab_size)
                if cause:
                    self.outputs += to_dead_letter(event, cause, env=self.env)
                    self.window.lose(group, [event])
                    group.refused[rollout.rollout_uid] = None
                    group.next_check_version = self.state.version

    def expire_deleted(self, deleted_below: Offsets) -> None:
        """Expire the members whose records retention has deleted: those below these offsets."""
        for group_id, group in list(self.window.open.items()):
            gone = [
                event
                for event in group.members
                if event.offset < deleted_below.get((event.topic, event.partition), 0)
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
            is_in_run = self.env in self.rules.envs
            if is_in_run and group.is_complete(self.state.version, self.rules):
                self.close_group(group_id)
        self.window.recount()

    def begin_epoch(self) -> None:
        """Tell the batcher that retention has deleted rollouts of the env that were not read. Their
        groups will not close.
        """
        self.publish("", empty_group(self.env, "", "", "", 0, begins_epoch=True))

    def remove_env(self) -> None:
        """The env was taken out of the run: everything that is held of it is filtered.

        Its topics may not be read or written now, so the ends of its groups are published when it
        is put back.
        """
        del self.state.windows[self.env]
        groups = self.state.groups_of_removed_envs.setdefault(self.env, {})
        for group_id, group in self.window.open.items():
            if group.members:
                self.record_fate("filtered", group.members, ENV_REMOVED)
            group.members = []
            groups[group_id] = group
        self.window = Window()

    def on_rollout_of_removed_env(self, event: Event, rollout: Rollout) -> None:
        """A rollout of an env that was taken out of the run has come, because the topic is that of
        its family. Its producer is owed the end of the group when the env is put back.
        """
        self.record_fate("filtered", [event], ENV_REMOVED)
        groups = self.state.groups_of_removed_envs[self.env]
        new = open_group(event, rollout, self.state.version)
        groups.setdefault(rollout.group_id, new)
        drop_oldest(groups, COUNTED_GROUPS)

    def restore_env(self) -> None:
        """The env was put back: the groups that were open when it was taken out have ended, and its
        producers may begin as many others.
        """
        window = self.state.windows.setdefault(self.env, self.window)
        for group_id, group in self.state.groups_of_removed_envs.pop(self.env).items():
            window.note_closed(group_id, self.state.version)
            self.publish(group_id, empty_record(self.env, group_id, group))

    # ---- outputs -----------------------------------------------------------------------------

    def publish(self, group_id: str, record: ScoredGroup) -> None:
        self.outputs.append(Output(topology.groups(self.env), group_id, record))

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
            **columns_of_fate(rollouts),
            cause=cause,
        )
        self.outputs.append(Output(topology.FATES, first.group_id, record))
