"""Batcher: scored groups in, batches out. Every env gets its share of the tokens, and a demand that
tells it how much more is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import msgspec

from streamrl.batcher.advantages import NORMALIZER_OF
from streamrl.batcher.balance import cost_named
from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.curriculum import CurriculumRules, CurriculumState
from streamrl.batcher.demand import absent_producers
from streamrl.batcher.selection import REMAINDER
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.config import topology
from streamrl.config.run_file import Fork, RunFile
from streamrl.log.protocol import Event, Log, Offsets, Output
from streamrl.processor import processor
from streamrl.processor.definition import Processor, ProcessorReport, run_settings
from streamrl.records import PolicyVersion, ScoredGroup


def step(
    config: BatcherConfig,
    state: BatcherState,
    events: Iterable[Event],
    time_s: float,
    before: int | None = None,
) -> tuple[BatcherState, list[Output]]:
    """Fold the events in, one by one. How a poll was cut does not matter, but for the demand, which
    is published once a step.

    `before`: build no batch of this number or a later one (a fork looks at what such a batch was
    made of).
    """
    builder = BatchBuilder(config, state, time_s)
    for event in events:
        match event.record:
            case PolicyVersion(learner=config.learner, version=version) if version > state.version:
                builder.on_policy_version(version)
            case ScoredGroup() as group:
                builder.on_group(event, group)
            case _:
                continue  # a version of another learner, or one that was announced before
        builder.build_batches(before)
    builder.report_shortage()
    builder.publish_demand()
    return state, builder.outputs


def reconcile(
    config: BatcherConfig, state: BatcherState, removed: Offsets, time_s: float
) -> tuple[BatcherState, list[Output]]:
    """Bring the state in line with this configuration, and let go of what retention has deleted:
    everything below the offsets of `removed`.
    """
    builder = BatchBuilder(config, state, time_s)
    builder.reconcile(removed)
    return state, builder.outputs


def paused(config: BatcherConfig, state: BatcherState) -> frozenset[str]:
    """An env of which enough is held is not read on, as what comes later is newer. But every env is
    read for what the next batch lacks.
    """
    if REMAINDER in state.short:
        return frozenset()
    limit = config.max_window_tokens
    full = [env for env, queue in state.queues.items() if queue.tokens >= limit]
    return frozenset(topology.groups(env) for env in full if env not in state.short)


def due(config: BatcherConfig, state: BatcherState, time_s: float) -> bool:
    """Is there a producer whose grants are to be taken back, although nothing comes?"""
    return any(
        absent_producers(config, env, queue, time_s) != queue.away
        for env, queue in state.queues.items()
        if env in config.producers
    )


def report(config: BatcherConfig, state: BatcherState, time_s: float) -> ProcessorReport:
    """What is held, and which share is short, by how much and for how long."""
    waited_s = time_s - state.short_since_s if state.short else 0.0
    values = {
        "batcher/blocked_s": waited_s,
        "batcher/next_batch": float(state.next_batch),
        "batcher/version": float(state.version),
    }
    for share, tokens in state.short.items():
        values[f"batcher/missing_tokens/{share or 'rest'}"] = float(tokens)
    for env, queue in state.queues.items():
        values[f"batcher/held_tokens/{env}"] = float(queue.tokens)
    warnings = list[str]()
    if waited_s >= config.shortage_after_s:
        for share, tokens in state.short.items():
            who = "the envs together" if share == REMAINDER else share
            waits = f"batch {state.next_batch} has waited {waited_s:.0f} s for {who}"
            warnings.append(f"{waits}, {tokens} tokens short")
    return ProcessorReport(values, tuple(warnings))


def first_state(fork: Fork | None) -> BatcherState:
    """The state that a run begins with. The first batch of a fork has the number of the version it
    begins with; its shares are owed what they were there, and its curriculum is where it was.
    """
    if fork is None:
        return BatcherState()
    return BatcherState(
        next_batch=fork.version,
        deficit=dict(fork.balance),
        progress=CurriculumState(fork.stage, fork.rewards),
    )


def curriculum(run: RunFile) -> CurriculumRules:
    settings = {**run.batcher.curriculum.model_dump(), "envs": tuple(run.envs), "version": 1}
    return msgspec.convert(settings, CurriculumRules)


def part(run: RunFile) -> Processor[BatcherConfig, BatcherState]:
    """Raises ConfigError for a balance that nobody knows."""
    cost_named(run.batcher.balance)
    granting = {
        name: env
        for name, env in run.envs.items()
        if run.batcher.admission != "demand" and env.replicas
    }
    config = BatcherConfig(
        fractions={name: env.fraction for name, env in run.envs.items()},
        learner=run.learner.name,
        total_token_budget=run.batcher.total_token_budget,
        max_seq_len=run.batcher.max_seq_len,
        row_count=run.batcher.rows,
        max_age=run.buffer.max_age,
        lookahead=run.batcher.lookahead,
        spill=run.batcher.on_shortage == "spill",
        max_window_tokens=run.buffer.max_window_tokens,
        shortage_after_s=run.batcher.shortage_after_s,
        advantage=run.batcher.advantage
        or NORMALIZER_OF.get(run.buffer_of(next(iter(run.envs))).advantage, "none"),
        curriculum=curriculum(run),
        processes=run.batcher.processes,
        balance=run.batcher.balance,
        hidden=run.model.hidden_size,
        admission=run.batcher.admission,
        eta=run.buffer.max_age if run.batcher.eta < 0 else run.batcher.eta,
        producers={
            name: [topology.producer(name, i) for i in range(env.replicas)]
            for name, env in granting.items()
        },
        group_tokens={
            name: run.buffer_of(name).group_size * 2 * env.max_tokens
            for name, env in granting.items()
        },
        rules_version=2,
        max_ages={
            name: env.buffer.max_age
            for name, env in run.envs.items()
            if env.buffer.max_age is not None
        },
        group_limits_s={
            name: env.rollout_timeout_s + 2 * env.env_timeout_s for name, env in granting.items()
        },
    )
    inputs = {
        **{topology.groups(env): ("scored-group",) for env in run.envs},
        topology.POLICY_VERSIONS: ("policy-version",),
    }
    return Processor(
        name="batcher",
        inputs=inputs,
        config=config,
        initial=partial(first_state, run.fork),
        step=step,
        paused=paused,
        report=report,
        reconcile=reconcile,
        due=due,
        **run_settings(run),
    )


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    processor.run_processor(log, part(run), stop)
