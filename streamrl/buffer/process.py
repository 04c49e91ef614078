"""Buffer: rollouts in, scored groups out; what is too old, doubled or late meets its fate here. One process serves any number of envs."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from streamrl.buffer.advantages import advantage_named
from streamrl.buffer.freshness import FUTURE_VERSIONS, furthest
from streamrl.buffer.window import Fold, Rules, State
from streamrl.config import RunFile
from streamrl.records import PolicyVersion, Rollout
from streamrl.stream import worker
from streamrl.stream.log import Event, Log, Output, Positions
from streamrl.stream.worker import Part, Report

CONSUMES = ("rollouts", "policy-versions")
PRODUCES = ("groups", "fates", "dead-letters", "metrics", "journal")


@dataclass(frozen=True)
class Config:
    envs: tuple[str, ...]
    learner: str  # whose versions count
    group_size: int  # rollouts per problem
    min_group_size: int
    max_age: int  # policy versions
    max_window_tokens: int  # of one env
    remember_versions: int  # how long uids and closed groups are known
    advantage: str
    zero_advantage: Literal["keep", "filter"] = "keep"
    ahead: int = FUTURE_VERSIONS  # versions: a rollout of one that is not heard of yet is held
    begins_at: int = -1  # a fork: what was sampled by versions not heard of yet lies there from the start, so it is read only once this one is heard

    @property
    def rules(self) -> Rules:
        return Rules(
            self.group_size,
            self.min_group_size,
            self.max_age,
            self.max_window_tokens,
            self.remember_versions,
            advantage_named(self.advantage),
            self.zero_advantage,
            self.ahead,
        )


def step(config: Config, state: State, events: Iterable[Event], time_s: float) -> tuple[State, list[Output]]:
    """Fold the events in, one by one: how a poll was cut does not matter."""
    fold = Fold(config.rules, state)
    for event in events:
        match event.record:
            case PolicyVersion(learner=config.learner, version=version) as announced if version > state.version:
                fold.hear(version, announced.vocab_size, time_s)
            case Rollout() as rollout:
                fold.take(event, rollout)
            case _:
                pass  # another learner's version, or one heard before
    return state, fold.outputs


def reconcile(config: Config, state: State, removed: Positions, time_s: float) -> tuple[State, list[Output]]:
    """The state under this configuration, without what retention has deleted: everything below the offsets of `removed`."""
    fold = Fold(config.rules, state)
    for env in list(state.windows):
        fold.expire_removed(env, removed)
        if env not in config.envs:
            fold.leave(env)
    return state, fold.outputs


def paused(config: Config, state: State) -> frozenset[str]:
    """The topic of an env whose window is full is not read on; nor any, before the version that a fork begins with is heard."""
    waiting = config.envs if state.version < config.begins_at else full(config, state)
    return frozenset(f"rollouts.{env}" for env in waiting)


def full(config: Config, state: State) -> list[str]:
    """Envs that have as much open as they may."""
    return sorted(env for env, window in state.windows.items() if window.tokens >= config.max_window_tokens)


def report(config: Config, state: State, time_s: float) -> Report:
    values = {f"buffer/window_tokens/{env}": float(window.tokens) for env, window in state.windows.items()}
    warnings = (f"the window of {env} is full of open groups, not reading on; raise buffer.max_window_tokens" for env in full(config, state))
    return Report({**values, "buffer/version": float(state.version)}, tuple(warnings))


def part(run: RunFile) -> Part[Config, State]:
    """The buffer of all envs of the run."""
    rules = run.buffer
    config = Config(
        envs=tuple(run.envs),
        learner=run.learner.name,
        group_size=rules.group_size,
        min_group_size=rules.min_group_size,
        max_age=rules.max_age,
        max_window_tokens=rules.max_window_tokens,
        remember_versions=rules.remember_versions,
        advantage=rules.advantage,
        zero_advantage=rules.zero_advantage,
        ahead=furthest(run.batcher.lookahead),
        begins_at=run.fork.version if run.fork else -1,
    )
    inputs = {**{f"rollouts.{env}": ("rollout",) for env in run.envs}, "policy-versions": ("policy-version",)}
    return Part(
        "buffer",
        inputs,
        config,
        State,
        step,
        paused,
        report,
        reconcile,
        snapshot_s=run.topics.snapshot_s,
        expires_removed=run.topics.on_removed == "expire",
        imports=run.imported,
        max_invalid_frac=rules.max_invalid_frac,
    )


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    worker.run(log, part(run), stop)
