"""The batcher in a simulation: the batcher itself, of groups without tokens. So what it asks envs
for, which groups it takes and which are too old are decided as in a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.state import BatcherConfig, BatcherState, EnvQueue, HeldGroup
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Demand, FateKind, JoinedGroup, ScoredGroup


@dataclass
class SimulatedGroup:
    """What is left of a group when it closes: nothing, if it has no `tokens`."""

    env: str
    producer: str
    tokens: int  # that it takes in a batch
    sampled_tokens: int
    oldest: int
    newest: int


class SimulatedBatcher(BatchBuilder):
    """One step of the batcher."""

    def __init__(self, config: BatcherConfig, state: BatcherState, time_s: float) -> None:
        state.clock.advance(time_s)
        super().__init__(config, state, time_s)
        self.built = list[list[SimulatedGroup]]()
        self.ended = list[tuple[FateKind, SimulatedGroup]]()

    def on_simulated_group(self, group: SimulatedGroup) -> None:
        """As `on_group`."""
        queue = self.state.queues.setdefault(group.env, EnvQueue())
        queue.closed[group.producer] = queue.closed.get(group.producer, 0) + 1
        queue.busy_since_s.pop(group.producer, None)
        if group.tokens > self.config.total_token_budget:
            self.ended.append(("filtered", group))
        elif group.tokens:
            held = _held(group)
            queue.add(held, announced=self.state.version)
            queue.measure(held.tokens)
            queue.tokens += held.tokens
            self.expire_old(group.env, queue)
            self.totals.on_group(group.env, held.tokens)
        self.totals.supply[group.env] = queue.usable_tokens

    def build(self) -> bool:
        """As in the batcher, without packing: the groups that are taken fit into rows."""
        selection = self.totals.attempt()
        if selection is None:
            self._shortage_unrecorded = True
            return False
        self.record_shortage(selection.short)
        if selection.short or not selection.chosen:
            return False
        groups = [_group(held) for held in self.take(selection, len(selection.chosen))]
        self.built.append(groups)
        self.ended += [("batched", group) for group in groups]
        return True

    def finish(self) -> list[Demand]:
        """Build what is due. Returns the demands that have changed."""
        self.build_batches()
        self.report_shortage()
        self.publish_demand()
        return [output.record for output in self.outputs if isinstance(output.record, Demand)]

    # The simulated group is in the place of the record that a held group refers to.

    def usable(self, held: HeldGroup) -> JoinedGroup:
        return cast(JoinedGroup, _group(held))

    def record_fate(
        self, fate: FateKind, group: ScoredGroup, cause: str = "", batch: int | None = None
    ) -> None:
        self.ended.append((fate, cast(SimulatedGroup, group)))


def _held(group: SimulatedGroup) -> HeldGroup:
    return HeldGroup(
        event=cast(Event, group),
        tokens=group.tokens,
        rollouts=0,
        oldest=group.oldest,
        newest=group.newest,
        of_newest=0,
        partition=0,
        offsets=[],
    )


def _group(held: HeldGroup) -> SimulatedGroup:
    return cast(SimulatedGroup, held.event)
