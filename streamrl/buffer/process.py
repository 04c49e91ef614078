"""Buffer: rollouts in, scored groups out; what is too old, doubled or late meets its fate here. One
process serves any number of envs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from streamrl.buffer.advantages import advantage_named
from streamrl.buffer.group_buffer import LOOK_S, Fold, Rules, State, Window, quiet_groups
from streamrl.buffer.staleness import FUTURE_VERSIONS, furthest
from streamrl.config import topology
from streamrl.config.run_file import Buffer, EnvBuffer, RunFile
from streamrl.log.protocol import Event, Log, Offsets, Output
from streamrl.processor import processor
from streamrl.processor.definition import Processor, Report, run_settings
from streamrl.records import PolicyVersion, Rollout


@dataclass(frozen=True)
class OwnRules:
    """Of an env that has rules of its own: all that one may have."""

    group_size: int
    min_group_size: int
    max_age: int
    advantage: str
    zero_advantage: Literal["keep", "filter"]
    group_wait_s: float

    def over(self, config: Config) -> Config:
        """The configuration with these rules instead of those for all."""
        return replace(
            config,
            group_size=self.group_size,
            min_group_size=self.min_group_size,
            max_age=self.max_age,
            advantage=self.advantage,
            zero_advantage=self.zero_advantage,
            group_wait_s=self.group_wait_s,
        )


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
    # 1: what is refused counts as lost of its group, groups do not wait for ever, ids belong to
    # their env, `validation.unsound`
    # 2: also what came before the vocabulary was known is held to it; an env that comes back gets
    # the ends of the groups that it had open
    rules_version: int = 0
    group_wait_s: float = 60.0  # without a new rollout: then a group closes with what it has
    max_seq_len: int = 0  # of the model; 0: not said
    partitions: int = 0  # of rollouts.<env>; 0: not said
    own: dict[str, OwnRules] = field(default_factory=dict[str, OwnRules])  # by env
    # a fork: what was sampled by versions not heard of yet lies there from the start, so it is read
    # only once this one is heard
    begins_at: int = -1

    def own_rules(self) -> dict[str, Rules]:
        """By env: of those that have rules of their own."""
        return {env: own.over(self).rules for env, own in self.own.items()}

    @property
    def rules(self) -> Rules:
        return Rules(
            self.group_size,
            self.min_group_size,
            self.max_age,
            self.max_window_tokens,
            self.remember_versions,
            advantage_named(self.advantage, self.rules_version),
            self.zero_advantage,
            self.ahead,
            self.rules_version,
            self.group_wait_s,
            self.max_seq_len,
            self.partitions,
        )


def step(
    config: Config, state: State, events: Iterable[Event], time_s: float
) -> tuple[State, list[Output]]:
    """Fold the events in, one by one: how a poll was cut does not matter."""
    fold = Fold(config.rules, state, time_s, config.own_rules())
    for event in events:
        match event.record:
            case PolicyVersion(learner=config.learner, version=version) as announced if (
                version > state.version
            ):
                fold.hear(version, announced.vocab_size)
            case Rollout() as rollout:
                fold.take(event, rollout)
            case _:
                pass  # another learner's version, or one heard before
    fold.close_quiet()
    return state, fold.outputs


def reconcile(
    config: Config, state: State, removed: Offsets, time_s: float
) -> tuple[State, list[Output]]:
    """The state under this configuration, without what retention has deleted: everything below the
    offsets of `removed`.
    """
    fold = Fold(config.rules, state, time_s, config.own_rules())
    for env in list(state.windows):
        fold.expire_removed(env, removed)
        if env not in config.envs:
            fold.leave(env)
    for env in [env for env in state.left if env in config.envs]:
        fold.come_back(env)
    return state, fold.outputs


def paused(config: Config, state: State) -> frozenset[str]:
    """No topic is read before the version that a fork begins with is heard. By the rules of version
    0, none of an env whose window is full.
    """
    waiting = config.envs if state.version < config.begins_at else full(config, state)
    return frozenset(topology.rollouts(env) for env in waiting)


def full(config: Config, state: State) -> list[str]:
    """Envs that have as much open as they may; by the rules of version 1 a full window closes its
    oldest groups instead.
    """
    return (
        []
        if config.rules_version
        else sorted(
            env
            for env, window in state.windows.items()
            if window.tokens >= config.max_window_tokens
        )
    )


def report(config: Config, state: State, time_s: float) -> Report:
    values = {
        f"buffer/window_tokens/{env}": float(window.tokens) for env, window in state.windows.items()
    }
    warnings = (
        f"the window of {env} is full of open groups, not reading on; raise buffer.max_window_tokens"
        for env in full(config, state)
    )
    warnings = [
        *warnings,
        *(
            warning
            for env, window in state.windows.items()
            for warning in complaints(config, env, window, time_s)
        ),
    ]
    return Report({**values, "buffer/version": float(state.version)}, tuple(warnings))


def due(config: Config, state: State, time_s: float) -> bool:
    """Has an open group waited for long enough, although nothing comes?"""
    if not config.rules_version or 0 <= time_s - state.looked_s < LOOK_S:
        return False
    rules, own = config.rules, config.own_rules()
    waited = (
        quiet_groups(own.get(env, rules), window, state.version, time_s)
        for env, window in state.windows.items()
    )
    return time_s < state.looked_s or any(waited)


def complaints(config: Config, env: str, window: Window, time_s: float) -> Iterator[str]:
    """What the producers of an env, or whoever set its rules, should know since the last version."""
    rules = config.own.get(env, config)
    half_s = rules.group_wait_s / 2
    if config.rules_version and (
        waiting := [group for group in window.open.values() if 0 <= group.last_s < time_s - half_s]
    ):
        most = max(len(group.members) + group.lost for group in waiting)
        yield (
            f"{len(waiting)} groups of {env} have had no new rollout for {half_s:g} s, with {most} of {rules.group_size} at most; they close after "
            f"{rules.group_wait_s:g} s. Does its producer send as many as buffer.group_size? Is it slow? Raise buffer.group_wait_s"
        )
    if window.intake.suspicious:
        yield f"{window.intake.suspicious} rollouts of {env} have logprobs that are all exactly 0; does its client ask for logprobs?"
    if window.intake.crowded_out:
        yield f"the window of {env} was full, {window.intake.crowded_out} groups below their minimum were closed; raise buffer.max_window_tokens"
    if window.intake.unscored:
        yield f"{env}: {window.intake.unscored}"


def own_of(rules: Buffer) -> OwnRules:
    return OwnRules(
        rules.group_size,
        rules.min_group_size,
        rules.max_age,
        rules.advantage,
        rules.zero_advantage,
        rules.group_wait_s,
    )


def part(run: RunFile) -> Processor[Config, State]:
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
        rules_version=2,
        group_wait_s=rules.group_wait_s,
        max_seq_len=run.model.max_seq_len,
        partitions=run.topics.partitions,
        own={
            env: own_of(run.buffer_of(env))
            for env, settings in run.envs.items()
            if settings.buffer != EnvBuffer()
        },
        begins_at=run.fork.version if run.fork else -1,
    )
    inputs = {
        **{topology.rollouts(env): ("rollout",) for env in run.envs},
        topology.POLICY_VERSIONS: ("policy-version",),
    }
    return Processor(
        "buffer",
        inputs,
        config,
        State,
        step,
        paused,
        report,
        reconcile,
        due=due,
        max_invalid_frac=rules.max_invalid_frac,
        **run_settings(run),
    )


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    processor.run_processor(log, part(run), stop)
