"""GroupBuffer: what a step of the buffer does for all envs."""

from __future__ import annotations

from itertools import takewhile

from streamrl.buffer.env_groups import EnvGroups
from streamrl.buffer.state import BufferConfig, BufferState
from streamrl.buffer.stats import IntakeStats
from streamrl.config import topology
from streamrl.stream.log.dead_letters import to_dead_letter
from streamrl.stream.log.protocol import Event, Output
from streamrl.stream.records import Metric, Rollout

IDLE_CHECK_S = 1.0  # awake, between two checks of how long the open groups have waited


class GroupBuffer:
    """One step of the buffer: it changes the state and collects the outputs."""

    def __init__(self, config: BufferConfig, state: BufferState, time_s: float) -> None:
        self.config = config
        self.state = state
        self.time_s = time_s
        self.outputs = list[Output]()
        self._groups = dict[str, EnvGroups]()
        # the envs of the run, and those that have left it
        self._known = frozenset((*config.envs, *state.groups_of_removed_envs))

    def groups_of(self, env: str) -> EnvGroups:
        groups = self._groups.get(env)
        if groups is None:
            rules = self.config.for_env(env)
            groups = EnvGroups(env, rules, self.state, self.outputs)
            self._groups[env] = groups
        return groups

    def on_policy_version(self, version: int, vocab_size: int) -> None:
        """A policy version was announced: forget the ids that were noted long ago, expire rollouts,
        close groups, and publish the metrics of the rollouts that came since the version before.
        """
        state = self.state
        is_new_vocabulary = vocab_size > 0 and vocab_size != state.vocab_size
        state.version = version
        state.vocab_size = vocab_size
        if is_new_vocabulary:
            for env in state.windows:
                self.groups_of(env).refuse_foreign_tokens()
        self.forget_ids(version - self.config.remember_versions)
        values = dict[str, float]()
        for env, window in state.windows.items():
            self.groups_of(env).on_policy_version()
            values |= window.intake.metrics(env)
            window.intake = IntakeStats()
        if values:
            source = topology.buffer_part(self.config.shard, self.config.shards)
            metric = Metric(source=source, time_s=self.time_s, step=version, values=values)
            self.outputs.append(Output(topology.METRICS, source, metric))

    def on_rollout(self, event: Event, rollout: Rollout) -> None:
        env = topology.env_of(event.topic, rollout.environment, self._known)
        if env in self.state.groups_of_removed_envs:
            self.groups_of(env).on_rollout_of_removed_env(event, rollout)
        elif env in self._known:
            self.groups_of(env).on_rollout(event, rollout)
        else:  # in the topic of a family
            cause = f"its environment is {rollout.environment!r}, which the run file does not have"
            self.outputs += to_dead_letter(event, cause)

    def close_idle_groups(self) -> None:
        """Close the groups to which nothing has been added for long. No version may come while the
        batch is short of just these groups, so this happens by time.
        """
        state = self.state
        if state.clock.awake_s - state.checked_s < IDLE_CHECK_S:
            return
        state.checked_s = state.clock.awake_s
        for env in state.windows:
            self.groups_of(env).close_idle()

    def forget_ids(self, horizon: int) -> None:
        """Forget uids and closed groups that were noted at a version below `horizon`."""
        for window in self.state.windows.values():
            for memory in (window.seen, window.closed):
                old = list(takewhile(lambda item: item[1] < horizon, memory.items()))
                for name, _ in old:
                    del memory[name]
