"""The buffer's configuration, by the run file."""

from __future__ import annotations

from streamrl.buffer.staleness import max_future_versions
from streamrl.buffer.state import BufferConfig
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import GroupRules
from streamrl.config.sections.envs import AnyEnv, EnvLoss
from streamrl.stream.records import LossWeights

# Ids of rollouts and of closed groups are remembered for so many versions after a rollout of them
# would be too old.
REMEMBERED_VERSIONS = 16


def buffer_config(run: RunFile, index: int) -> BufferConfig:
    """The configuration of shard number `index` of the run's buffer."""
    rules = run.buffer
    return BufferConfig(
        envs=tuple(run.envs),
        learner=run.learner.name,
        max_window_tokens=rules.max_window_tokens // rules.shards,
        remember_versions=REMEMBERED_VERSIONS + max(run.buffer_of(env).max_age for env in run.envs),
        ahead=max_future_versions(run.batcher.lookahead),
        max_seq_len=run.model.max_seq_len,
        partitions=run.topics.partitions,
        own={name: own for name, env in run.envs.items() if (own := own_rules(env))},
        begins_at=run.fork.version if run.fork else -1,
        shard=index,
        shards=rules.shards,
        **rules.model_dump(include=set(GroupRules.model_fields)),
        losses={
            env: LossWeights(**settings.loss.model_dump())
            for env, settings in run.envs.items()
            if settings.loss != EnvLoss()
        },
    )


def own_rules(env: AnyEnv) -> dict[str, int | float | str]:
    """The rules that an env has for itself, by their names in BufferConfig."""
    if env.sessions is None:
        return env.buffer.given
    return {**env.buffer.given, "session_wait_s": env.sessions.idle_s + env.sessions.reward_wait_s}
