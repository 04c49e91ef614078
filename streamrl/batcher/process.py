"""Batcher: scored groups in, batches out; every env its share of the tokens, and a demand that
tells it how much more is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import msgspec

from streamrl.batcher.advantages import STAGE_OF
from streamrl.batcher.balance import cost_named
from streamrl.batcher.batch_builder import Config, Fold, State, absent
from streamrl.batcher.curriculum import Progress, Rules
from streamrl.batcher.selection import REST
from streamrl.config import topology
from streamrl.config.run_file import Fork, RunFile
from streamrl.log.protocol import Event, Log, Offsets, Output
from streamrl.processor import processor
from streamrl.processor.definition import Processor, Report, run_settings
from streamrl.records import PolicyVersion, ScoredGroup


def step(
    config: Config, state: State, events: Iterable[Event], time_s: float, before: int | None = None
) -> tuple[State, list[Output]]:
    """Fold the events in, one by one: how a poll was cut does not matter, but for the demand, which
    is said once a step.

    `before`: build no batch of this number or a later one (a fork looks at what such a batch was
    made of).
    """
    fold = Fold(config, state, time_s)
    for event in events:
        match event.record:
            case PolicyVersion(learner=config.learner, version=version) if version > state.version:
                fold.hear(version)
            case ScoredGroup() as group:
                fold.take(event, group)
            case _:
                continue  # another learner's version, or one heard before
        fold.build_all(before)
    fold.say_short()
    fold.say_demand()
    return state, fold.outputs


def reconcile(
    config: Config, state: State, removed: Offsets, time_s: float
) -> tuple[State, list[Output]]:
    """The state under this configuration, without what retention has deleted: everything below the
    offsets of `removed`.
    """
    fold = Fold(config, state, time_s)
    fold.reconcile(removed)
    return state, fold.outputs


def paused(config: Config, state: State) -> frozenset[str]:
    """An env of which enough is held is not read on: what comes later is newer. But for what the
    next batch lacks, every one is.
    """
    held = [env for env, pool in state.pools.items() if pool.tokens >= config.max_window_tokens]
    return frozenset(
        topology.groups(env) for env in held if REST not in state.short and env not in state.short
    )


def due(config: Config, state: State, time_s: float) -> bool:
    """Is there a producer whose grants are to be taken back, although nothing comes?"""
    pools = {env: pool for env, pool in state.pools.items() if env in config.producers}
    return any(absent(config, env, pool, time_s) != pool.away for env, pool in pools.items())


def report(config: Config, state: State, time_s: float) -> Report:
    """Nobody waits silently: which share is short, by how much, and for how long."""
    waited_s = time_s - state.short_since_s if state.short else 0.0
    values = {
        f"batcher/missing_tokens/{share or 'rest'}": float(tokens)
        for share, tokens in state.short.items()
    }
    values |= {
        f"batcher/held_tokens/{env}": float(pool.tokens) for env, pool in state.pools.items()
    }
    values |= {
        "batcher/blocked_s": waited_s,
        "batcher/next_batch": float(state.next_batch),
        "batcher/version": float(state.version),
    }
    if waited_s < config.shortage_after_s:
        return Report(values)
    who = {share: "the envs together" if share == REST else share for share in state.short}
    waits = (
        f"batch {state.next_batch} has waited {waited_s:.0f} s for {who[share]}, {tokens} tokens short"
        for share, tokens in state.short.items()
    )
    return Report(values, tuple(waits))


def first_state(fork: Fork | None) -> State:
    """A fork's first batch has the number of the version it begins with; its shares are owed what
    they were there, its curriculum is where it was.
    """
    if fork is None:
        return State()
    return State(
        next_batch=fork.version,
        balance=dict(fork.balance),
        progress=Progress(fork.stage, fork.rewards),
    )


def curriculum(run: RunFile) -> Rules:
    return msgspec.convert(
        {**run.batcher.curriculum.model_dump(), "envs": tuple(run.envs), "version": 1}, Rules
    )


def part(run: RunFile) -> Processor[Config, State]:
    """Raises ConfigError for a balance that nobody knows."""
    cost_named(run.batcher.balance)
    granting = {
        name: env
        for name, env in run.envs.items()
        if run.batcher.admission != "demand" and env.replicas
    }
    config = Config(
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
        or STAGE_OF.get(run.buffer_of(next(iter(run.envs))).advantage, "none"),
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
        "batcher",
        inputs,
        config,
        partial(first_state, run.fork),
        step,
        paused,
        report,
        reconcile,
        due=due,
        **run_settings(run),
    )


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    processor.run_processor(log, part(run), stop)
