"""`streamrl rescore`: gives the recorded rollouts of an env a new reward, as records on
`rewards.<env>`. What the run has trained on does not change. A fork can train on the rollouts again
with the new rewards (`streamrl fork --rewards`).

A rollout is judged as in a live run: the env poses its problem again, and the reward function gets
the policy's completion. A function that raises, takes too long or returns no finite number is
called again. After ATTEMPTS calls the record has the cause instead of a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import AnyEnv
from streamrl.envs.api import (
    AgentLoopEnv,
    BaseEnv,
    Completion,
    PolicyTurn,
    Problem,
    RewardFunction,
    RewardResult,
)
from streamrl.envs.catalog import make_env, make_reward
from streamrl.envs.engine.problems import make_problem
from streamrl.envs.engine.time_limits import call, reward_threads
from streamrl.envs.sessions.messages import joined_text
from streamrl.envs.sessions.rewards import apply_weights, normalize
from streamrl.extensions.recordings.progress import OnProgress, no_progress
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.log.records_of import records_of, rollouts_of
from streamrl.stream.records import Reward, Rollout
from streamrl.stream.records.compact import wide_ids
from streamrl.system.errors import ConfigError, StreamrlError, describe_error

ATTEMPTS = 3
PORTION = 256  # rollouts that are judged at once, and whose rewards are written together


class RescoreResult(NamedTuple):
    """The numbers of rollouts, and the mean rewards of all that this scorer has rewarded by now."""

    rescored: int
    failed: int
    known: int  # rollouts that had a reward of this scorer and version before
    passed_over: int  # rollouts that have failed, or whose tokens cannot be those sampled
    before: float  # mean of the rewards in the rollouts
    after: float  # mean of the new ones, weighted


class UnsupportedRewardLevel(StreamrlError):
    """The function gives rewards of single turns or tokens."""


# ---- one rollout ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardScorer:
    """A reward function under a name and a version, and the env that posed the problems."""

    name: str
    version: str
    function: RewardFunction
    # None: the problems cannot be posed again, for instance those of an agent.
    env: BaseEnv | None
    limit_s: float  # of one call of the function
    threads: asyncio.Semaphore = field(default_factory=reward_threads)

    async def rewards(self, rollout: Rollout, time_s: float) -> list[Reward]:
        """The records for a rollout: its rewards by name, or one with the cause of having none."""
        cause = ""
        for _ in range(ATTEMPTS):
            try:
                values = await self._judge(rollout)
            except UnsupportedRewardLevel:
                raise
            except Exception as error:  # it is another author's code
                cause = describe_error(error)
                continue
            return [
                self._record(rollout, time_s, name=name, value=value)
                for name, value in values.items()
            ]
        return [self._record(rollout, time_s, name=self.name, failure=cause)]

    async def _judge(self, rollout: Rollout) -> dict[str, float]:
        problem = problem_of(rollout, self.env)
        completion = completion_of(rollout, problem)
        result = await call(
            self.function,
            problem,
            completion,
            dict(rollout.rewards),
            limit_s=self.limit_s,
            threads=self.threads,
            what=f"reward {self.name!r}",
        )
        return reward_values(result, self.name)

    def _record(self, rollout: Rollout, time_s: float, **fields: Any) -> Reward:
        return Reward(
            rollout=rollout.rollout_uid,
            scorer=self.name,
            scorer_version=self.version,
            time_s=time_s,
            rescored=True,
            **fields,
        )


def problem_of(rollout: Rollout, env: BaseEnv | None) -> Problem:
    """The problem of a rollout. The env poses it again where it can; otherwise it has the first
    message and the metadata of the rollout, and no answer.

    Raises ValueError if the env poses another problem now, because its settings have changed.
    """
    first = rollout.turns[0]
    if env is None or not rollout.problem_id.isdecimal():
        messages = [{"role": first.role, "content": first.message}]
        return Problem(messages, metadata=rollout.metadata)
    problem = make_problem(env, int(rollout.problem_id))
    if not isinstance(env, AgentLoopEnv) and joined_text(problem.messages) != first.message:
        raise ValueError(
            f"the env now poses another problem {rollout.problem_id} than the rollout was given"
        )
    return problem


def completion_of(rollout: Rollout, problem: Problem) -> Completion:
    """The policy's completion of the problem, as a reward function gets it."""
    sampled = [turn for turn in rollout.turns if turn.logprobs is not None]
    messages = [
        *problem.messages,
        *({"role": turn.role, "content": turn.message} for turn in rollout.turns[1:]),
    ]
    return Completion(
        text=sampled[-1].message,
        finished=not rollout.truncated,
        turns=[
            PolicyTurn(turn.message, wide_ids(turn.tokens))
            for turn in sampled
            if turn.tokens is not None
        ],
        messages=messages,
        truncation=str(rollout.metadata.get("truncation", "")),
    )


def reward_values(result: float | RewardResult, name: str) -> dict[str, float]:
    """The rewards that a reward function returned, by name.

    Raises TypeError or ValueError for what is no reward, and UnsupportedRewardLevel for rewards
    of turns or tokens, for which a record has no field.
    """
    rewards = normalize(result, name)
    if rewards.turns or rewards.tokens:
        raise UnsupportedRewardLevel(
            f"reward {name!r} gives rewards of turns or tokens; a record has one value for the"
            " whole rollout: return that"
        )
    if not rewards.rollout:
        raise ValueError("it gave no reward")
    values = dict[str, float]()
    for key, value in rewards.rollout.items():
        if isinstance(value, str | bytes):
            raise TypeError(f"reward {key!r} is {value!r}, which is no number")
        # The record checks that the number is finite.
        values[key] = Reward(rollout="any", name=key, value=float(value)).value
    return values


# ---- all rollouts of an env ----------------------------------------------------------------------


@dataclass
class Tally:
    """Counts rollouts, and sums up their rewards."""

    weights: Mapping[str, float]
    rescored: int = 0
    failed: int = 0
    known: int = 0
    passed_over: int = 0
    before: float = 0.0  # the sum of the recorded rewards
    after: float = 0.0  # the sum of the new rewards
    valued: int = 0  # the rollouts in both sums

    def add(self, rollout: Rollout, rewards: Iterable[Reward]) -> None:
        """Add a rollout and the scorer's rewards for it to the sums."""
        values = {reward.name: reward.value for reward in rewards if not reward.failure}
        if values:
            self.valued += 1
            self.before += rollout.reward
            self.after += apply_weights(normalize(values), self.weights, []).reward

    def result(self) -> RescoreResult:
        count = max(self.valued, 1)
        return RescoreResult(
            rescored=self.rescored,
            failed=self.failed,
            known=self.known,
            passed_over=self.passed_over,
            before=self.before / count,
            after=self.after / count,
        )


async def rescore(
    log: Log,
    env: str,
    scorer: RewardScorer,
    weights: Mapping[str, float],
    clock: Callable[[], float] = time.time,
    progress: OnProgress = no_progress,
) -> RescoreResult:
    """Give the recorded rollouts of `env` the rewards of a scorer.

    A rollout with a reward of this scorer and version is skipped, so that a second call continues
    where the first was interrupted. It judges again what the first could not, for instance because
    the judge was away. `weights` are those of the run file, for the means.
    """
    # A new writer ends its predecessor's transaction, whose records a reader may not see before.
    writer = log.writer(topology.RESCORER)
    try:
        recorded = rewards_of_scorer(log, env, scorer.name, scorer.version)
        known = {uid: given for uid, given in recorded.items() if not any(r.failure for r in given)}
        total = sum(1 for _ in distinct_rollouts(log, env))
        tally = Tally(weights)
        done = 0
        rollouts = distinct_rollouts(log, env)
        while portion := list(islice(rollouts, PORTION)):
            new = list[Rollout]()
            for rollout in portion:
                if rollout.failure or rollout.misaligned:
                    tally.passed_over += 1
                elif rollout.rollout_uid in known:
                    tally.known += 1
                    tally.add(rollout, known[rollout.rollout_uid])
                else:
                    new.append(rollout)
            time_s = clock()
            judged = await asyncio.gather(*[scorer.rewards(rollout, time_s) for rollout in new])
            for rollout, rewards in zip(new, judged, strict=True):
                tally.failed += any(reward.failure for reward in rewards)
                tally.rescored += not any(reward.failure for reward in rewards)
                tally.add(rollout, rewards)
            topic = topology.rewards(env)
            outputs = [Output(topic, each.rollout, each) for rewards in judged for each in rewards]
            if outputs:
                writer.commit([to_message(output) for output in outputs])
            done += len(portion)
            progress(done, total)
    finally:
        writer.close()
    return tally.result()


def distinct_rollouts(log: Log, env: str) -> Iterator[Rollout]:
    """The recorded rollouts of an env, each uid once."""
    seen: dict[str, None] = {}
    for _, rollout, _ in rollouts_of(log, [env]):
        if rollout.rollout_uid not in seen:
            seen[rollout.rollout_uid] = None
            yield rollout


def rewards_of_scorer(log: Log, env: str, name: str, version: str) -> dict[str, list[Reward]]:
    """The rewards that a version of a scorer gave, by the uid of the rollout.

    Only records of `rescore` count: what came through the gateway may name any scorer.
    Of several rewards with the same name, the last one counts. A rollout that `rescore` could not
    judge at first, and then could, has not failed.
    """
    by_uid: dict[str, dict[str, Reward]] = {}
    for reward, _ in records_of(log, topology.rewards(env), Reward):
        if reward.rescored and (reward.scorer, reward.scorer_version) == (name, version):
            given = by_uid.setdefault(reward.rollout, {})
            if any(earlier.failure for earlier in given.values()):
                given.clear()
            given[reward.name] = reward
    return {uid: list(rewards.values()) for uid, rewards in by_uid.items()}


# ---- the scorer that a command line names --------------------------------------------------------


def scorer_of(run: RunFile, env: str, reward: str, version: str) -> RewardScorer:
    """The scorer for `NAME=KIND`, or for `NAME`, a reward function that the run file gives the env.

    An empty `version` means a hash of its source. Raises ConfigError.
    """
    name, _, kind = reward.partition("=")
    settings = run.envs[env]
    params: Mapping[str, Any] = {}
    where = "--reward"
    if not kind:
        if name not in settings.rewards:
            raise ConfigError(
                f"--reward {reward}: envs.{env}.rewards has no {name!r}; give"
                " NAME=FILE.py:FUNCTION, NAME=MODULE:FUNCTION or a shipped one"
            )
        kind = settings.rewards[name].kind
        params = settings.rewards[name].params
        where = f"envs.{env}.rewards.{name}"
    if not name or any(sign in name for sign in "@,"):
        raise ConfigError(f"--reward {reward}: a name has at least a letter, and no '@' or ','")
    function = make_reward(kind, params, where)
    return RewardScorer(
        name=name,
        version=version or source_version(function, params),
        function=function,
        env=env_that_posed(settings, env),
        limit_s=settings.env_timeout_s,
    )


def env_that_posed(settings: AnyEnv, name: str) -> BaseEnv | None:
    """The env that can pose its problems again, or None if the run does not pose them."""
    if settings.sessions:
        return None
    try:
        where = f"envs.{name}"
        return make_env(settings.kind or name, settings.seed, settings.params, where)
    except ConfigError:
        if settings.replicas:
            raise
        return None  # an env that the run does not start may be of any kind


def source_version(function: RewardFunction, params: Mapping[str, Any]) -> str:
    """The first digits of a hash of the file that defines a reward function, and of its params.
    Raises ConfigError if there is no such file.
    """
    owner = function if inspect.isroutine(function) else type(function)
    module = sys.modules.get(getattr(owner, "__module__", ""))
    path = getattr(module, "__file__", None)
    if path is None:
        raise ConfigError("--version: the reward function has no source file; give its version")
    digest = hashlib.sha256(Path(path).read_bytes())
    digest.update(repr(sorted(params.items())).encode())
    return digest.hexdigest()[:12]


def resolve_env_option(run: RunFile, name: str) -> str:
    """The env that `--env` names; without a name the only one. Raises ConfigError."""
    if name in run.envs:
        return name
    if not name and len(run.envs) == 1:
        return next(iter(run.envs))
    raise ConfigError(f"--env {name or '?'}: the run has {', '.join(run.envs)}")
