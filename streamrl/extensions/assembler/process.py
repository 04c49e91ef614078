"""Assembler: model calls and rewards in, rollouts out. Each session of an agent becomes one rollout
once it has ended and has its rewards, however late they come.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.assembler.extension import ASSEMBLER
from streamrl.extensions.assembler.session_assembler import (
    SessionAssembler,
    counts,
    expire_removed,
    is_check_due,
    remove_env,
    restore_env,
)
from streamrl.extensions.assembler.state import AssemblerConfig, AssemblerState, SessionRules
from streamrl.stream.log.protocol import Event, Log, Offsets, Output
from streamrl.stream.processor import processor
from streamrl.stream.processor.definition import Processor, ProcessorReport, run_settings
from streamrl.stream.records import ModelCall, Reward, SessionEnd, SessionStart
from streamrl.system.errors import ConfigError


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    processor.run_processor(log, make_processor(run), stop)


def make_processor(run: RunFile) -> Processor[AssemblerConfig, AssemblerState]:
    """The assembler of all envs of the run that have sessions. Raises ConfigError without any."""
    if not run.session_envs:
        raise ConfigError(
            "no env of the run has sessions, so there is nothing to assemble; give one"
            " `sessions: {}` and `replicas: 0`"
        )
    rules = {env: rules_of(run, env) for env in run.session_envs}
    schemas = ("session-start", "model-call", "reward", "session-end")
    return Processor(
        name=ASSEMBLER.name,
        inputs={topology.turns(env): schemas for env in rules},
        config=AssemblerConfig(envs=rules),
        initial=AssemblerState,
        step=step,
        report=report,
        reconcile=reconcile,
        due=due,
        clock=lambda state: state.clock,
        **run_settings(run),
    )


def rules_of(run: RunFile, env: str) -> SessionRules:
    settings = run.envs[env]
    assert settings.sessions is not None
    return SessionRules(
        rewards=tuple(settings.sessions.rewards),
        reward_weights=dict(settings.reward_weights),
        idle_s=settings.sessions.idle_s,
        reward_wait_s=settings.sessions.reward_wait_s,
        group_size=run.buffer_of(env).group_size,
    )


def step(
    config: AssemblerConfig, state: AssemblerState, events: Iterable[Event], time_s: float
) -> tuple[AssemblerState, list[Output]]:
    """Fold the events in, one by one. How a poll was cut does not matter."""
    outputs = list[Output]()
    state.clock.advance(time_s)
    assemblers = {
        env: SessionAssembler(env, rules, state, time_s, outputs)
        for env, rules in config.envs.items()
    }
    for event in events:
        assembler = assemblers[topology.subject_of(event.topic)]
        match event.record:
            case SessionStart() as start:
                assembler.on_start(event, start)
            case ModelCall() as call:
                assembler.on_call(event, call)
            case SessionEnd() as end:
                assembler.on_end(event, end)
            case Reward() as reward:
                assembler.on_reward(event, reward)
            case _:
                pass
    if is_check_due(state):
        state.checked_s = state.clock.awake_s
        for env in state.envs:
            if env in assemblers:
                assemblers[env].check_time_limits()
    return state, outputs


def reconcile(
    config: AssemblerConfig, state: AssemblerState, removed: Offsets, time_s: float
) -> tuple[AssemblerState, list[Output]]:
    """Bring the state in line with this configuration and with what retention has deleted:
    everything below the offsets of `removed`.
    """
    outputs = list[Output]()
    for env, sessions in list(state.envs.items()):
        if env in config.envs:
            outputs += expire_removed(env, sessions, removed)
        else:
            remove_env(state, env)
    for env in [env for env in state.sessions_of_removed_envs if env in config.envs]:
        outputs += restore_env(state, env)
    return state, outputs


def report(config: AssemblerConfig, state: AssemblerState, time_s: float) -> ProcessorReport:
    """How many sessions are open, and how many of them wait for rewards."""
    values = dict[str, float]()
    for env, sessions in state.envs.items():
        open_sessions, waiting = counts(sessions.open)
        values[f"assembler/open_sessions/{env}"] = float(open_sessions)
        values[f"assembler/waiting_for_rewards/{env}"] = float(waiting)
    return ProcessorReport(values)


def due(config: AssemblerConfig, state: AssemblerState, time_s: float) -> bool:
    """Whether something is open whose time limits are to be checked."""
    is_empty = not any(s.open or s.groups for s in state.envs.values())
    return not is_empty and state.clock.is_due(time_s)
