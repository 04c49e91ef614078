"""Batcher: scored groups in, batches out. Every env gets its share of the tokens, and is told by
its demand how many more tokens are wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.report import report
from streamrl.batcher.selection import REMAINDER
from streamrl.batcher.settings import batcher_config, first_state
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.buffer.groups import join_rollouts
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.protocol import Event, Log, Offsets, Output
from streamrl.stream.processor import processor
from streamrl.stream.processor.definition import Processor, run_settings
from streamrl.stream.processor.join import NOT_THERE, Join, RecordRef
from streamrl.stream.records import (
    PolicyVersion,
    Record,
    RolloutTokens,
    ScoredGroup,
    first_of_rollout_mask,
)


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Run the batcher until `stop` is set."""
    processor.run_processor(log, make_processor(run), stop)


def make_processor(run: RunFile) -> Processor[BatcherConfig, BatcherState]:
    """The batcher of the run."""
    inputs = {
        **{topology.groups(env): ("scored-group",) for env in run.envs},
        topology.POLICY_VERSIONS: ("policy-version",),
    }
    join = Join(
        topics=frozenset(map(topology.rollouts, run.envs)),
        schemas=("rollout",),
        part=RolloutTokens,
        references=references,
        join=join_group,
    )
    return Processor(
        name=topology.BATCHER.name,
        inputs=inputs,
        join=join,
        config=batcher_config(run),
        initial=partial(first_state, run.fork),
        step=step,
        paused=paused,
        report=report,
        reconcile=reconcile,
        due=due,
        clock=lambda state: state.clock,
        **run_settings(run),
    )


def references(record: Record) -> list[RecordRef]:
    """The places of the rollouts of a group, in its order."""
    if not isinstance(record, ScoredGroup):
        return []
    topic = topology.rollouts(record.environment)
    first = first_of_rollout_mask(record.uids)
    return [(topic, record.partition, offset) for offset in record.offsets[first].tolist()]


def join_group(record: Record, rollouts: Sequence[RolloutTokens]) -> Record:
    """The group joined with its rollouts. Raises ValueError if they do not fit it."""
    assert isinstance(record, ScoredGroup)
    uids = [record.uids[i] for i in np.flatnonzero(first_of_rollout_mask(record.uids))]
    if [rollout.rollout_uid for rollout in rollouts] != uids:
        raise ValueError(NOT_THERE)
    return join_rollouts(record, rollouts)


def step(
    config: BatcherConfig,
    state: BatcherState,
    events: Iterable[Event],
    time_s: float,
    before: int | None = None,
) -> tuple[BatcherState, list[Output]]:
    """Fold the events into the state, one by one. So it does not matter how they were polled,
    except for the demand, which is published once a step.

    `before`: build no batch of this number or a later one. A fork uses it to see what such a batch
    is made of.
    """
    state.clock.advance(time_s)
    builder = BatchBuilder(config, state, time_s)
    for event in events:
        match event.record:
            case PolicyVersion(learner=config.learner, version=version) if version > state.version:
                builder.on_policy_version(version)
            case ScoredGroup() as group:
                builder.on_group(event, group)
            case _:
                # It is a version of another learner, or one that was announced before.
                continue
        builder.build_batches(before)
    builder.report_shortage()
    builder.publish_demand()
    return state, builder.outputs


def reconcile(
    config: BatcherConfig, state: BatcherState, removed: Offsets, time_s: float
) -> tuple[BatcherState, list[Output]]:
    """Bring the state in line with this configuration, and drop what retention has deleted:
    everything below the offsets of `removed`.
    """
    builder = BatchBuilder(config, state, time_s)
    builder.reconcile(removed)
    return state, builder.outputs


def paused(config: BatcherConfig, state: BatcherState) -> frozenset[str]:
    """The topics that are not read now. A topic with an env of which enough is held is not read,
    because what comes later is newer. A topic with an env that the next batch lacks is always read,
    and if the batch lacks tokens of any env, all are.
    """
    if REMAINDER in state.short:
        return frozenset()
    limit = config.max_window_tokens
    full = [env for env, queue in state.queues.items() if queue.tokens >= limit]
    return frozenset(map(topology.groups, full)) - frozenset(map(topology.groups, state.short))


def due(config: BatcherConfig, state: BatcherState, time_s: float) -> bool:
    """Whether the clock has to advance although no record comes: the next batch is short, or a
    producer has groups open, whose grants may be taken back.
    """
    waits_for_producers = any(
        queue.busy_since_s for env, queue in state.queues.items() if env in config.producers
    )
    return bool(state.short or waits_for_producers) and state.clock.is_due(time_s)
