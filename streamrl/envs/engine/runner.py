"""Makes the rollouts of a problem: the conversations of a group, their rewards, and the records.

Every turn continues from the exact tokens before it. Where the chat template rewrites an earlier
answer, the rollout forks (`inference/clients/prefix.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.config.sections.envs import EnvSettings
from streamrl.envs.api import AgentLoopEnv, BaseEnv, RewardFunction, RewardResult, SingleTurnEnv
from streamrl.envs.engine import time_limits
from streamrl.envs.engine.first_request import FirstRequest, Sampler
from streamrl.envs.engine.recording import SessionRecording, TurnRecorder
from streamrl.envs.engine.session import RolloutSession
from streamrl.envs.engine.transcript import Task, Transcript, transcript_to_rollout
from streamrl.envs.sessions.rewards import WeightedRewards, apply_weights, merge, normalize, totals
from streamrl.envs.sessions.rollouts import build_failed_rollout
from streamrl.inference.clients.client import SamplingFailed
from streamrl.stream.records import Rollout, SessionStart
from streamrl.system.errors import describe_error


@dataclass(frozen=True)
class RolloutRunner:
    """Runs groups of rollouts of one env."""

    env: BaseEnv
    settings: EnvSettings
    sampler: Sampler
    # The reward functions of the run file, by name; the env's own rewards come before them.
    rewards: Mapping[str, RewardFunction] = field(default_factory=dict[str, RewardFunction])
    # Shared by all reward functions that are no coroutines.
    threads: asyncio.Semaphore = field(default_factory=time_limits.reward_threads)
    recorder: TurnRecorder | None = None  # None: model calls are not recorded

    async def run_group(self, task: Task, n: int) -> list[Rollout]:
        """`n` rollouts of one problem. Raises SamplingFailed if the policy answered in none of
        them.
        """
        recordings = [self._recording(task, index) for index in range(n)]
        new = [index for index, recording in enumerate(recordings) if not recording.earlier]
        first_request = FirstRequest(task.problem, new, self.settings, self.sampler)
        sessions = [
            RolloutSession(
                env=self.env,
                index=index,
                first_request=first_request,
                settings=self.settings,
                sampler=self.sampler,
                transcript=Transcript(task.problem),
                recording=recording,
            )
            for index, recording in enumerate(recordings)
        ]
        try:
            if isinstance(self.env, AgentLoopEnv):
                return await self._run_together(self.env, task, sessions)
            assert isinstance(self.env, SingleTurnEnv)
            if len(new) == n:
                await first_request.answers()
            running = [self._run_alone(self.env, task, session) for session in sessions]
            return await asyncio.gather(*running)
        finally:
            await first_request.close()

    def _recording(self, task: Task, index: int) -> SessionRecording:
        name = task.name(index)
        if self.recorder is None:
            return SessionRecording(name.uid)
        start = SessionStart(
            session=name.uid,
            environment=name.environment,
            problem_id=name.problem_id,
            group_id=name.group_id,
            time_s=time.time(),
        )
        return self.recorder.session(start)

    async def close(self) -> None:
        """End the processes and connections of the env and of the reward functions."""
        for each in (self.env, *self.rewards.values()):
            close = getattr(each, "close", None)  # a reward function need not have one
            if close:
                await close()

    async def _run_alone(self, env: SingleTurnEnv, task: Task, session: RolloutSession) -> Rollout:
        """Run one rollout; its rewards are its own."""
        await session.run()
        result: RewardResult | Exception
        if session.failure:
            result = SamplingFailed(session.failure)
        else:
            completion = session.transcript.completion
            try:
                result = await self.call(env.rewards, task.problem, completion, what="its rewards")
            except Exception as error:
                result = error
        return await self._build_rollout(
            task, session, result, _oldest(session.transcript.versions)
        )

    async def _run_together(
        self, env: AgentLoopEnv, task: Task, sessions: Sequence[RolloutSession]
    ) -> list[Rollout]:
        """Run a group whose rewards the env gives together."""
        await asyncio.gather(*[session.run() for session in sessions])
        answered = [session for session in sessions if not session.failure]
        if not answered:
            raise SamplingFailed(sessions[0].failure)
        results = iter(await self._judge(env, task, answered))
        oldest = _oldest(
            [version for session in sessions for version in session.transcript.versions]
        )
        rollouts: list[Rollout] = []
        for session in sessions:
            result = SamplingFailed(session.failure) if session.failure else next(results)
            rollouts.append(await self._build_rollout(task, session, result, oldest))
        return rollouts

    async def _judge(
        self, env: AgentLoopEnv, task: Task, sessions: Sequence[RolloutSession]
    ) -> Sequence[RewardResult | Exception]:
        """The env's rewards of each rollout, or the reason why there are none."""
        notes = [session.notes for session in sessions]
        try:
            results = await self.call(env.judge, task.problem, notes, what="its rewards")
            if len(results) != len(sessions):
                raise ValueError(
                    f"rewards of {len(results)} rollouts, where there are {len(sessions)}"
                )
            return results
        except Exception as error:
            return [error] * len(sessions)

    async def _build_rollout(
        self,
        task: Task,
        session: RolloutSession,
        result: RewardResult | Exception,
        oldest_version: int,
    ) -> Rollout:
        """The record of a rollout. It is a failed one if there are no rewards, or if no reader
        would accept it: an env is another author's code, and may give anything.
        """
        try:
            if isinstance(result, Exception):
                raise result
            rewards = await self._weigh_rewards(session.transcript, result)
            return transcript_to_rollout(task, session.index, session.transcript, rewards)
        except SamplingFailed as error:
            cause = str(error)
        except Exception as error:
            cause = describe_error(error)
        return build_failed_rollout(task.name(session.index), cause, oldest_version)

    async def _weigh_rewards(self, transcript: Transcript, result: RewardResult) -> WeightedRewards:
        """The rewards of the env and of the functions of the run file, weighted."""
        rewards = normalize(result)
        for name, function in self.rewards.items():
            other = await self.call(
                function,
                transcript.problem,
                transcript.completion,
                totals(rewards),
                what=f"reward {name!r}",
            )
            rewards = merge(rewards, normalize(other, name))
        return apply_weights(rewards, self.settings.reward_weights, transcript.turn_lengths)

    async def call(self, function: Callable[..., Any], *arguments: Any, what: str) -> Any:
        """The result of an env's function, within the env's time limit (`time_limits.call`)."""
        return await time_limits.call(
            function,
            *arguments,
            limit_s=self.settings.env_timeout_s,
            threads=self.threads,
            what=what,
        )


def _oldest(versions: Sequence[int]) -> int:
    """The oldest policy version, which becomes that of a failed rollout; 0 if there is none."""
    return max(min(versions, default=0), 0)
