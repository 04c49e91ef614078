"""The batcher's configuration, by the run file, and the state that it begins with."""

from __future__ import annotations

import msgspec

from streamrl.batcher.advantages import NORMALIZER_OF
from streamrl.batcher.balance import cost_named
from streamrl.batcher.curriculum import CurriculumRules, CurriculumState
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Fork


def batcher_config(run: RunFile) -> BatcherConfig:
    """The configuration of the run's batcher. Raises ConfigError if its `batcher.balance` names no
    function.
    """
    cost_named(run.batcher.balance)
    rules = run.batcher
    advantage = rules.advantage
    if not advantage:
        # those that the policy gradient trains need the same; the others need nothing
        compared = [name for name, env in run.envs.items() if env.loss.policy_gradient]
        first_env = (compared or list(run.envs))[0]
        advantage = NORMALIZER_OF.get(run.buffer_of(first_env).advantage, "none")
    # The producers of these envs are granted groups. Others begin groups by the demand alone.
    granted = {}
    if rules.admission != "demand":
        granted = {name: env for name, env in run.envs.items() if env.producers}
    return BatcherConfig(
        fractions={name: env.fraction for name, env in run.envs.items()},
        learner=run.learner.name,
        total_token_budget=rules.total_token_budget,
        max_seq_len=rules.max_seq_len,
        row_count=rules.rows,
        max_age=run.buffer.max_age,
        lookahead=rules.lookahead,
        spill=rules.on_shortage == "spill",
        max_window_tokens=run.buffer.max_window_tokens,
        advantage=advantage,
        curriculum=curriculum_rules(run),
        processes=rules.processes,
        balance=rules.balance,
        hidden=run.model.hidden_size,
        admission=rules.admission,
        producers={
            name: [topology.producer(name, i) for i in range(env.producers)]
            for name, env in granted.items()
        },
        group_tokens={
            name: run.buffer_of(name).group_size * 2 * env.max_tokens
            for name, env in run.envs.items()
        },
        row_lengths=list(rules.row_lengths),
        max_ages={
            name: env.buffer.max_age
            for name, env in run.envs.items()
            if env.buffer.gives("max_age")
        },
        group_limits_s={
            name: env.rollout_timeout_s + 2 * env.env_timeout_s for name, env in granted.items()
        },
    )


def curriculum_rules(run: RunFile) -> CurriculumRules:
    """The rules of the curriculum, by the run file."""
    chosen = run.batcher.curriculum
    settings = chosen.model_dump() if chosen else {}
    return msgspec.convert({**settings, "envs": tuple(run.envs)}, CurriculumRules)


def first_state(fork: Fork | None) -> BatcherState:
    """The state that a run begins with. The first batch of a fork has the number of the version
    that it begins with, and the fork inherits what each share is owed and the stage of the
    curriculum.
    """
    if fork is None:
        return BatcherState()
    return BatcherState(
        next_batch=fork.version,
        deficit=dict(fork.balance),
        progress=CurriculumState(fork.stage, fork.rewards),
    )
