"""The buffer's configuration, by the run file."""

from __future__ import annotations

from streamrl.buffer.staleness import max_future_versions
from streamrl.buffer.state import BufferConfig, EnvRules
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import Buffer
from streamrl.config.sections.envs import EnvBuffer, EnvLoss, Sessions
from streamrl.stream.records import LossWeights


def buffer_config(run: RunFile, index: int) -> BufferConfig:
    """The configuration of shard number `index` of the run's buffer."""
    rules = run.buffer
    return BufferConfig(
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
        group_wait_s=rules.group_wait_s,
        max_seq_len=run.model.max_seq_len,
        partitions=run.topics.partitions,
        own={
            env: env_rules(run.buffer_of(env), settings.sessions)
            for env, settings in run.envs.items()
            if settings.buffer != EnvBuffer() or settings.sessions
        },
        begins_at=run.fork.version if run.fork else -1,
        shard=index,
        shards=rules.shards,
        losses={
            env: LossWeights(**settings.loss.model_dump())
            for env, settings in run.envs.items()
            if settings.loss != EnvLoss()
        },
    )


def env_rules(settings: Buffer, sessions: Sessions | None) -> EnvRules:
    """The rules of an env whose settings are these."""
    return EnvRules(
        group_size=settings.group_size,
        min_group_size=settings.min_group_size,
        max_age=settings.max_age,
        advantage=settings.advantage,
        zero_advantage=settings.zero_advantage,
        group_wait_s=settings.group_wait_s,
        session_wait_s=sessions.idle_s + sessions.reward_wait_s if sessions else 0.0,
    )
