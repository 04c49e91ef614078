"""BatchBuilder: scored groups wait in the queue of their env and leave in a batch, or by another
fate.

A group that arrives counts as closed for its env. Rollouts that are too long for a row are
filtered, and so is a group that no batch can hold; one that is too old for the next batch expires.
The others wait in the queue. A group that was sampled by a version that is not announced yet waits
apart until it is.

Batch k is due when version k - `lookahead` is announced. It is built as soon as every share has its
tokens: of each env its fraction of the batch, and the rest of any env (`selection.py`, with the
sums that `env_totals.py` keeps). The chosen groups are packed into rows, the batch is published,
and its rollouts get the fate `batched`. Groups that are too old for the batch after it expire. If a
share is short the batch waits. At the end of each step the shortage is recorded and every env is
told how much more is wanted (`demand.py`).

An example with two envs of 50 % each, batches of 40 tokens, groups of 10 tokens, `lookahead` 0 and
`max_age` 1. Version 3 is announced, so batch 3 is due. Three groups of env `a` wait and one of env
`b`. They are 40 tokens, but 10 of `b`'s 20 tokens are missing: `state.short` is {"b": 10}. Another
group of `b` arrives, and batch 3 is built of the two oldest groups of `a` and the two of `b`. The
third group of `a` waits for batch 4. A group of version 2 would expire now, because batch 4 takes
versions 3 and 4 only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.batcher.advantages import normalize_batch, normalizer_named
from streamrl.batcher.assemble import (
    Sharding,
    assemble,
    drop_too_long,
    within_bytes,
)
from streamrl.batcher.balance import costs_of
from streamrl.batcher.curriculum import advance, stage_of
from streamrl.batcher.demand import update_demands
from streamrl.batcher.env_totals import EnvTotals
from streamrl.batcher.metrics import batch_metrics, waiting_metrics
from streamrl.batcher.packing import pack, row_shapes
from streamrl.batcher.selection import (
    DATA,
    REMAINDER,
    Candidate,
    Selection,
    carry_deficit,
    charged_for,
    rebase_deficit,
    waits_for,
)
from streamrl.batcher.state import (
    BatcherConfig,
    BatcherState,
    EnvQueue,
    HeldGroup,
    deficit_under,
    fractions_at,
    group_of,
    held_group,
    on_policy_rollouts,
)
from streamrl.buffer.staleness import is_fresh
from streamrl.config import topology
from streamrl.stream.log.chunks import record_limit
from streamrl.stream.log.dead_letters import text_of
from streamrl.stream.log.protocol import Event, Offsets, Output
from streamrl.stream.records import (
    ENV_REMOVED,
    Batch,
    Fate,
    FateKind,
    JoinedGroup,
    Metric,
    ScoredGroup,
    first_of_rollout_mask,
)
from streamrl.stream.records.sequences import sampled_counts, sampled_turns, sums_from

ROLLOUTS_DELETED = "retention has deleted rollouts of its group before it was used"


class BatchBuilder:
    """One step of the batcher: it changes the state and collects the outputs."""

    def __init__(self, config: BatcherConfig, state: BatcherState, time_s: float) -> None:
        self.config = config
        self.state = state
        self.time_s = time_s
        self.outputs = list[Output]()
        self.totals = EnvTotals(config, state)
        self._shortage_unrecorded = False  # `state.short` is that of an earlier moment

    # ---- a group arrives ---------------------------------------------------------------------

    def on_group(self, event: Event, group: ScoredGroup) -> None:
        """Count the group as closed for its env, and queue what of it can be trained on."""
        env = group.environment
        queue = self.state.queues.setdefault(env, EnvQueue())
        if group.begins_epoch:
            queue.begin_epoch()
            return
        queue.count_closed(group)
        if not isinstance(group, JoinedGroup):
            if group.uids:
                self.record_fate("expired", group, ROLLOUTS_DELETED)
            return
        usable, too_long = drop_too_long(group, self.config.max_seq_len)
        if too_long is not None:
            cause = f"longer than max_seq_len {self.config.max_seq_len}"
            self.record_fate("filtered", too_long, cause)
        cause = self.cause_to_filter(usable)
        if cause:
            self.record_fate("filtered", usable, cause)
        elif usable.uids:
            held = held_group(event, usable)
            queue.add(held, announced=self.state.version)
            queue.measure(held.tokens)
            queue.tokens += held.tokens
            queue.rollouts += held.rollouts
            self.expire_old(env, queue)
            self.totals.on_group(env, held.tokens)
        if env in self.totals.supply:
            self.totals.supply[env] = queue.usable_tokens

    def cause_to_filter(self, group: ScoredGroup) -> str:
        """Why no batch can hold this group; empty if one can."""
        budget = self.config.total_token_budget
        if group.uids and group.environment not in self.config.fractions:
            return ENV_REMOVED
        if group.total_tokens > budget:
            return f"group larger than total_token_budget {budget}"
        if group.uids and not self.fits_rows(group):
            return self.too_large
        return ""

    def fits_rows(self, group: ScoredGroup) -> bool:
        """Whether the rows of a batch hold this group if there is no other. Sequences longer than
        half a row need a row each.
        """
        config = self.config
        if len(group.uids) <= config.row_count:
            return True
        lengths = group.sequence_lengths
        costs = costs_of(lengths, config.balance, config.hidden)
        rows = pack(lengths, config.max_seq_len, config.row_count, config.processes, costs)
        return rows is not None

    @property
    def too_large(self) -> str:
        rows = f"{self.config.row_count} rows of {self.config.max_seq_len} tokens"
        return f"group does not fit into the {rows} of a batch; raise batcher.row_count"

    def usable(self, held: HeldGroup) -> JoinedGroup:
        """The rollouts of a queued group that fit into a row."""
        return drop_too_long(group_of(held.event), self.config.max_seq_len)[0]

    def expire_old(self, env: str, queue: EnvQueue) -> None:
        """Expire the groups that are too old for the next batch."""
        max_age = self.config.max_age_of(env)
        for groups in (queue.groups, queue.ahead):
            while groups and not is_fresh(self.state.next_batch, groups[0].oldest, max_age):
                self.record_fate("expired", self.usable(queue.remove(groups, 0)))

    # ---- a version is announced --------------------------------------------------------------

    def on_policy_version(self, version: int) -> None:
        """Version `version` is announced: groups that it has sampled may be used."""
        self.state.version = version
        for queue in self.state.queues.values():
            waiting = queue.ahead
            queue.ahead = []
            for held in waiting:
                queue.add(held, announced=version)
        self.totals.refresh()

    # ---- batches -----------------------------------------------------------------------------

    def build_batches(self, before: int | None = None) -> None:
        """Build the batches that are due, one after another, until one lacks something.

        `before`: build no batch of this number or a later one.
        """
        while self.batch_is_due() and self.state.next_batch != before and self.build():
            for env, queue in self.state.queues.items():
                self.expire_old(env, queue)
            self.totals.refresh()

    def batch_is_due(self) -> bool:
        """Whether the version is announced that the next batch waits for."""
        return self.state.version >= max(self.state.next_batch - self.config.lookahead, 0)

    def build(self) -> bool:
        """Try to build the next batch, and publish it. False if some share is short, so the batch
        waits. True if queues have changed: the batch is built, or groups were filtered because no
        batch can be made of them.
        """
        selection = self.totals.attempt()
        if selection is None:
            self._shortage_unrecorded = True
            return False
        self.record_shortage(selection.short)
        if selection.short or not selection.chosen:
            return False
        queues = self.state.queues
        groups = [self.usable(queues[c.env].groups[c.position]) for c in selection.chosen]
        packed = self.pack_groups(groups)
        if packed is None:
            self.filter(selection.chosen[:1], self.too_large)
            return True
        taken = len(packed.group_ids)
        try:
            batch = normalize_batch(packed, normalizer_named(self.config.advantage))
        except MemoryError:
            raise  # it is about this process and not about the batch
        except Exception as error:  # the normalizer may be the user's
            self.filter(selection.chosen[:taken], f"batcher.advantage: {text_of(error)}")
            return True
        self.publish(batch, groups[:taken], selection)
        return True

    def pack_groups(self, groups: Sequence[JoinedGroup]) -> Batch | None:
        """The batch of these groups, in the shortest rows that hold them. If no rows hold them all,
        or no record does, the last ones are left for the next batch. None if no rows hold even the
        first group.
        """
        config = self.config
        groups = groups[: within_bytes(groups, record_limit(topology.BATCHES))]
        sharding = Sharding(config.processes, config.balance, config.hidden)
        shapes = row_shapes(
            config.row_count, config.max_seq_len, config.row_lengths, config.processes
        )
        for count in range(len(groups), 0, -1):
            longest = max(int(group.sequence_lengths.max(initial=0)) for group in groups[:count])
            for row_count, row_length in shapes:
                if longest > row_length:
                    continue
                batch = assemble(
                    groups[:count],
                    number=self.state.next_batch,
                    policy_version=self.state.version,
                    row_count=row_count,
                    max_seq_len=row_length,
                    sharding=sharding,
                )
                if batch is not None:
                    return batch
        return None

    def publish(self, batch: Batch, groups: Sequence[ScoredGroup], selection: Selection) -> None:
        """Publish the batch, the fates of its rollouts and its metrics, and take its groups."""
        config = self.config
        state = self.state
        held = {
            env: (queue.rollouts, queue.tokens, on_policy_rollouts(queue.groups, state.version))
            for env, queue in state.queues.items()
        }
        self.outputs.append(Output(topology.BATCHES, str(batch.number), batch))
        for group in groups:
            self.record_fate("batched", group, batch=batch.number)
        waited = state.waited
        self.take(selection, len(groups))
        newest_versions = np.concatenate([group.newest_versions for group in groups])
        values = batch_metrics(config, batch, held, newest_versions)
        values |= waiting_metrics(waited)
        if config.curriculum.kind != "none":
            for env, fraction in fractions_at(config, state, batch.number).items():
                values[f"batches/{env}/frac_wanted"] = fraction
            stage = stage_of(config.curriculum, state.progress.stage, batch.number)
            values["batcher/curriculum_stage"] = float(stage)
            state.progress = advance(config.curriculum, state.progress, batch)
        metric = Metric(source="batcher", time_s=self.time_s, step=batch.number, values=values)
        self.outputs.append(Output(topology.METRICS, "batcher", metric))

    def take(self, selection: Selection, count: int) -> list[HeldGroup]:
        """Take the first `count` groups of the selection for the next batch, out of their queues.
        Carry over what each share got too much or too little.
        """
        config = self.config
        state = self.state
        taken = selection.chosen[:count]
        fractions = fractions_at(config, state, state.next_batch)
        state.deficit = carry_deficit(
            fractions,
            deficit_under(config, state, fractions),
            charged_for(selection, count),
            config.spill,
        )
        for candidate in taken:
            state.queues[candidate.env].last_batch = state.next_batch
        removed = self.remove(taken)
        state.next_batch += 1
        state.waited = {}
        return removed

    def remove(self, candidates: Sequence[Candidate]) -> list[HeldGroup]:
        """Take these groups out of their queues. The last one of an env comes first, so the
        positions of the others stay the same.
        """
        removed = list[HeldGroup]()
        for candidate in sorted(candidates, key=lambda c: c.position, reverse=True):
            queue = self.state.queues[candidate.env]
            removed.append(queue.remove(queue.groups, candidate.position))
        return removed

    def filter(self, candidates: Sequence[Candidate], cause: str) -> None:
        """Take these groups out of their queues, because they cannot be trained on."""
        for held in self.remove(candidates):
            self.record_fate("filtered", self.usable(held), cause)

    # ---- the end of a step -------------------------------------------------------------------

    def report_shortage(self) -> None:
        """Record what the next batch lacks if no groups were selected for it, because some share
        was certainly short. Once a step is enough, because only the demand and the report use it.
        """
        if self._shortage_unrecorded or (self.batch_is_due() and self.totals.is_clearly_short):
            self.record_shortage(self.totals.lacking())

    def record_shortage(self, short: dict[str, int]) -> None:
        """Record what the next batch is short of: tokens by share. Until now it was short of
        `state.short`, so the time since the last record is added to what it has waited for that.
        """
        state = self.state
        now_s = state.clock.awake_s
        if state.short:
            cause = DATA
            if not self.config.spill:
                fractions = fractions_at(self.config, state, state.next_batch)
                cause = waits_for(state.short, fractions)
            state.waited[cause] = state.waited.get(cause, 0.0) + now_s - state.waited_until_s
        elif short:
            state.short_since_s = now_s
        state.short = short
        state.waited_until_s = now_s
        self._shortage_unrecorded = False

    def publish_demand(self) -> None:
        """Publish the demands that have changed."""
        for demand in update_demands(self.config, self.state):
            self.outputs.append(Output(topology.DEMAND, demand.environment, demand))

    # ---- after a restart ---------------------------------------------------------------------

    def reconcile(self, removed: Offsets) -> None:
        """Drop the groups below the offsets of `removed`, which retention has deleted, and those of
        envs that were taken out of the run. What these envs were owed goes to the others.
        """
        state = self.state
        envs = self.config.fractions
        cut = {topic for topic, _ in removed}
        for env, queue in state.queues.items():
            if topology.groups(env) in cut:
                queue.begin_epoch()
            for groups in (queue.groups, queue.ahead):
                for position in reversed(range(len(groups))):
                    event = groups[position].event
                    if event.offset < removed.get((event.topic, event.partition), 0):
                        self.record_deleted(env, queue.remove(groups, position))
                    elif env not in envs:
                        held = queue.remove(groups, position)
                        self.record_fate("filtered", self.usable(held), ENV_REMOVED)
        state.short = {
            share: tokens
            for share, tokens in state.short.items()
            if share in envs or share == REMAINDER
        }
        fractions = fractions_at(self.config, state, state.next_batch)
        state.deficit = rebase_deficit(fractions, state.deficit)
        self.totals.refresh()
        # A run whose producers wait for groups that are gone would otherwise make no step.
        self.publish_demand()

    # ---- fates -------------------------------------------------------------------------------

    def record_deleted(self, env: str, held: HeldGroup) -> None:
        """Publish the fate of a group whose record retention has deleted. Its rollouts may still be
        in the log.
        """
        record = Fate(
            fate="expired",
            environment=env,
            partition=held.partition,
            offsets=np.array(held.offsets, np.int64),
            cause="retention has deleted its group before it was used",
        )
        self.outputs.append(Output(topology.FATES, held.event.key, record))

    def record_fate(
        self, fate: FateKind, group: ScoredGroup, cause: str = "", batch: int | None = None
    ) -> None:
        """Publish the fate of the group's rollouts. A rollout of several sequences has one fate."""
        first = first_of_rollout_mask(group.uids)
        starts = np.flatnonzero(first)
        record = Fate(
            fate=fate,
            environment=group.environment,
            partition=group.partition,
            offsets=group.offsets[first],
            uids=[group.uids[i] for i in starts.tolist()],
            policy_versions=group.oldest_versions[first],
            tokens=sums_from(sampled_counts(group), starts),
            turns=sums_from(sampled_turns(group), starts),
            rewards=group.rewards[first],
            batch=batch,
            cause=cause,
        )
        self.outputs.append(Output(topology.FATES, group.group_id, record))
