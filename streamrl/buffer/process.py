"""Buffer: rollouts in, scored groups out. A rollout that is too old, doubled or late meets its fate
here. One process serves any number of envs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from streamrl.buffer.group_buffer import IDLE_CHECK_S, GroupBuffer, idle_groups
from streamrl.buffer.staleness import max_future_versions
from streamrl.buffer.state import BufferConfig, BufferState, EnvRules, Window
from streamrl.config import topology
from streamrl.config.run_file import Buffer, EnvBuffer, RunFile
from streamrl.errors import ConfigError
from streamrl.log.protocol import Event, Log, Offsets, Output
from streamrl.processor import processor
from streamrl.processor.definition import Processor, ProcessorReport, run_settings
from streamrl.records import PolicyVersion, Rollout


def step(
    config: BufferConfig, state: BufferState, events: Iterable[Event], time_s: float
) -> tuple[BufferState, list[Output]]:
    """Fold the events in, one by one. How a poll was cut does not matter."""
    buffer = GroupBuffer(config, state, time_s)
    for event in events:
        match event.record:
            case PolicyVersion(learner=config.learner, version=version) as announced if (
                version > state.version
            ):
                buffer.on_policy_version(version, announced.vocab_size)
            case Rollout() as rollout:
                buffer.on_rollout(event, rollout)
            case _:
                pass  # a version of another learner, or one that was announced before
    buffer.close_idle_groups()
    return state, buffer.outputs


def reconcile(
    config: BufferConfig, state: BufferState, removed: Offsets, time_s: float
) -> tuple[BufferState, list[Output]]:
    """Bring the state in line with this configuration, and let go of what retention has deleted:
    everything below the offsets of `removed`.
    """
    buffer = GroupBuffer(config, state, time_s)
    for env in list(state.windows):
        buffer.expire_removed(env, removed)
        if env not in config.envs:
            buffer.remove_env(env)
    for env in [env for env in state.left if env in config.envs]:
        buffer.restore_env(env)
    return state, buffer.outputs


def paused(config: BufferConfig, state: BufferState) -> frozenset[str]:
    """Topics that are not read now. A fork reads none before the version that it begins with is
    announced. Under the rules of version 0, an env whose window is full is not read.
    """
    waiting = full_envs(config, state)
    if state.version < config.begins_at:
        waiting = list(config.envs)
    return frozenset(topology.rollouts(env) for env in waiting)


def full_envs(config: BufferConfig, state: BufferState) -> list[str]:
    """Envs that have as many tokens open as they may. Since version 1 of the rules a full window
    closes its oldest groups instead.
    """
    if config.rules_version:
        return []
    limit = config.max_window_tokens
    return sorted(env for env, window in state.windows.items() if window.tokens >= limit)


def report(config: BufferConfig, state: BufferState, time_s: float) -> ProcessorReport:
    """How full the windows are, and what their producers should know."""
    values = {"buffer/version": float(state.version)}
    warnings = list[str]()
    for env in full_envs(config, state):
        full = f"the window of {env} is full of open groups, not reading on"
        warnings.append(f"{full}; raise buffer.max_window_tokens")
    for env, window in state.windows.items():
        values[f"buffer/window_tokens/{env}"] = float(window.tokens)
        warnings += warnings_of(config, env, window, time_s)
    return ProcessorReport(values, tuple(warnings))


def due(config: BufferConfig, state: BufferState, time_s: float) -> bool:
    """Has an open group waited for long enough, although nothing comes?"""
    if not config.rules_version or 0 <= time_s - state.looked_s < IDLE_CHECK_S:
        return False
    if time_s < state.looked_s:  # the clock was set back
        return True
    return any(
        idle_groups(config.for_env(env), window, state.version, time_s)
        for env, window in state.windows.items()
    )


def warnings_of(config: BufferConfig, env: str, window: Window, time_s: float) -> Iterator[str]:
    """What the producers of an env, or whoever set its rules, should know."""
    rules = config.for_env(env)
    half_s = rules.group_wait_s / 2
    waiting = [
        group for group in window.open.values() if 0 <= group.last_rollout_s < time_s - half_s
    ]
    if config.rules_version and waiting:
        most = max(group.size for group in waiting)
        yield (
            f"{len(waiting)} groups of {env} have had no new rollout for {half_s:g} s, with {most} "
            f"of {rules.group_size} at most; they close after {rules.group_wait_s:g} s. Does its "
            "producer send as many as buffer.group_size? Is it slow? Raise buffer.group_wait_s"
        )
    intake = window.intake
    if intake.suspicious:
        yield (
            f"{intake.suspicious} rollouts of {env} have logprobs that are all exactly 0; does its "
            "client ask for logprobs?"
        )
    if intake.crowded_out:
        yield (
            f"the window of {env} was full, {intake.crowded_out} groups below their minimum were "
            "closed; raise buffer.max_window_tokens"
        )
    if intake.unscored:
        yield f"{env}: {intake.unscored}"


def env_rules(settings: Buffer) -> EnvRules:
    return EnvRules(
        group_size=settings.group_size,
        min_group_size=settings.min_group_size,
        max_age=settings.max_age,
        advantage=settings.advantage,
        zero_advantage=settings.zero_advantage,
        group_wait_s=settings.group_wait_s,
    )


def shards(run: RunFile) -> list[Processor[BufferConfig, BufferState]]:
    """The buffer of all envs of the run: one processor, or one for each of its shards."""
    return [part(run, index) for index in range(run.buffer.shards)]


def part(run: RunFile, index: int = 0) -> Processor[BufferConfig, BufferState]:
    """One shard of the buffer. Raises ConfigError where the run has no such shard."""
    rules = run.buffer
    if index >= rules.shards:
        raise ConfigError(
            f"--index {index}: buffer.shards is {rules.shards}, so the last shard is"
            f" {rules.shards - 1}"
        )
    me = topology.buffer_shard(index, rules.shards)
    config = BufferConfig(
        envs=tuple(run.envs),
        learner=run.learner.name,
        group_size=rules.group_size,
        min_group_size=rules.min_group_size,
        max_age=rules.max_age,
        max_window_tokens=rules.max_window_tokens // rules.shards,
        remember_versions=rules.remember_versions,
        advantage=rules.advantage,
        zero_advantage=rules.zero_advantage,
        ahead=max_future_versions(run.batcher.lookahead),
        rules_version=2,
        group_wait_s=rules.group_wait_s,
        max_seq_len=run.model.max_seq_len,
        partitions=run.topics.partitions,
        own={
            env: env_rules(run.buffer_of(env))
            for env, settings in run.envs.items()
            if settings.buffer != EnvBuffer()
        },
        begins_at=run.fork.version if run.fork else -1,
        shard=index,
        shards=rules.shards,
    )
    inputs = {
        **{topology.rollouts(env): ("rollout",) for env in run.envs},
        topology.POLICY_VERSIONS: ("policy-version",),
    }
    return Processor(
        name=me.identity,
        inputs=inputs,
        config=config,
        initial=BufferState,
        step=step,
        paused=paused,
        report=report,
        reconcile=reconcile,
        due=due,
        takes=me.takes,
        max_invalid_frac=rules.max_invalid_frac,
        **run_settings(run),
    )


def main(run: RunFile, log: Log, stop: threading.Event, index: int = 0) -> None:
    processor.run_processor(log, part(run, index), stop)
