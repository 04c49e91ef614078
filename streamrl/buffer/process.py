"""Buffer: rollouts in, scored groups out. A rollout that is too old, late or a duplicate gets its
fate here. One process serves any number of envs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from streamrl.buffer.group_buffer import GroupBuffer
from streamrl.buffer.report import report
from streamrl.buffer.settings import buffer_config
from streamrl.buffer.state import BufferConfig, BufferState, Window
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.protocol import Event, Log, Offsets, Output
from streamrl.stream.processor import processor
from streamrl.stream.processor.definition import Processor, run_settings
from streamrl.stream.records import PolicyVersion, Rollout
from streamrl.system.errors import ConfigError


def main(run: RunFile, log: Log, stop: threading.Event, index: int = 0) -> None:
    """Run shard number `index` until `stop` is set."""
    processor.run_processor(log, make_processor(run, index), stop)


def make_processor(run: RunFile, index: int = 0) -> Processor[BufferConfig, BufferState]:
    """Shard number `index` of the buffer. Raises ConfigError if the run has no such shard."""
    if index >= run.buffer.shards:
        raise ConfigError(
            f"--index {index}: buffer.shards is {run.buffer.shards}, so the last shard is"
            f" {run.buffer.shards - 1}"
        )
    me = topology.buffer_shard(index, run.buffer.shards)
    inputs = {
        **{topology.rollouts(env): ("rollout",) for env in run.envs},
        topology.POLICY_VERSIONS: ("policy-version",),
    }
    return Processor(
        name=me.identity,
        inputs=inputs,
        config=buffer_config(run, index),
        initial=BufferState,
        step=step,
        paused=paused,
        report=report,
        reconcile=reconcile,
        due=due,
        clock=lambda state: state.clock,
        takes=me.takes,
        max_invalid_frac=run.buffer.max_invalid_frac,
        **run_settings(run),
    )


def shards(run: RunFile) -> list[Processor[BufferConfig, BufferState]]:
    """The shards of the run's buffer. A buffer that is not divided is one shard."""
    return [make_processor(run, index) for index in range(run.buffer.shards)]


def step(
    config: BufferConfig, state: BufferState, events: Iterable[Event], time_s: float
) -> tuple[BufferState, list[Output]]:
    """Fold the events into the state, one by one, so it does not matter how they were polled."""
    state.clock.advance(time_s)
    buffer = GroupBuffer(config, state, time_s)
    for event in events:
        match event.record:
            case PolicyVersion() as announced:
                if announced.learner == config.learner and announced.version > state.version:
                    buffer.on_policy_version(announced.version, announced.vocab_size)
            case Rollout() as rollout:
                buffer.on_rollout(event, rollout)
            case _:
                pass
    buffer.close_idle_groups()
    return state, buffer.outputs


def reconcile(
    config: BufferConfig, state: BufferState, removed: Offsets, time_s: float
) -> tuple[BufferState, list[Output]]:
    """Bring the state in line with this configuration, and drop what retention has deleted:
    everything below the offsets of `removed`.
    """
    buffer = GroupBuffer(config, state, time_s)
    for env in list(state.windows):
        groups = buffer.groups_of(env)
        groups.expire_deleted(removed)
        if env not in config.envs:
            groups.remove_env()
    for env in [env for env in state.groups_of_removed_envs if env in config.envs]:
        buffer.groups_of(env).restore_env()
    inputs = {topology.rollouts(env) for env in config.envs}
    cut = {topic for topic, _ in removed if topic in inputs}
    for env in [*config.envs, *state.groups_of_removed_envs]:
        if topology.rollouts(env) in cut:
            buffer.groups_of(env).begin_epoch()
    members = Counter(map(topology.family_of, config.envs))
    for env in config.envs:
        family = topology.family_of(env)
        if family != env or members[family] > 1:  # if it leaves the run, its topic is still read
            state.windows.setdefault(env, Window())
    return state, buffer.outputs


def paused(config: BufferConfig, state: BufferState) -> frozenset[str]:
    """The topics that are not read now. A fork reads no rollouts before the version that it begins
    with is announced.
    """
    if state.version >= config.begins_at:
        return frozenset()
    return frozenset(topology.rollouts(env) for env in config.envs)


def due(config: BufferConfig, state: BufferState, time_s: float) -> bool:
    """Whether the clock has to advance although no record comes: some group is open."""
    has_open = any(window.open for window in state.windows.values())
    return has_open and state.clock.is_due(time_s)
