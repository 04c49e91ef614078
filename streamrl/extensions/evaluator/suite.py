"""An evaluation suite: held-out problems, answers to them by exactly one policy version, and their
statistics.

The server reports which version sampled each token. An answer that failed, or that is not of the
requested version from its first token to its last, does not count and is requested again. An answer
that took too long counts as wrong, as one that `max_tokens` cuts off does: if only the answers in
time counted, a policy would be the better the more of its wrong answers are long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import structs

from streamrl.config.goals import reaches
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import EnvSettings, FreelySampled
from streamrl.config.sections.serving import EvalEnv
from streamrl.envs.catalog import make_rewards
from streamrl.envs.engine.first_request import Sampler
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.envs.held_out import HeldOutProblem, make_eval_env, select_held_out
from streamrl.envs.sessions.rollouts import build_failed_rollout
from streamrl.extensions.evaluator.estimates import mean_of_problems, over_problems
from streamrl.inference.clients.client import SamplingFailed, SamplingTimeout, is_too_late
from streamrl.stream.records import Evaluation, PassAt, PolicyVersion, Rollout

ROUNDS = 3  # Answers that do not count are requested again in at most this many rounds altogether.


@dataclass(frozen=True)
class EvalSuite:
    """An evaluation of the run file, with its problems and its env."""

    name: str
    environment: str  # the env of the run that it is drawn from
    own: EvalEnv  # its settings in the run file
    problems: Sequence[HeldOutProblem]
    runner: RolloutRunner

    async def close(self) -> None:
        await self.runner.close()


class ProblemAnswers(NamedTuple):
    """The answers of a version to one problem."""

    # the answers that count, with their rewards; those that took too long are failed rollouts
    rollouts: list[Rollout]
    repeated: int  # the number of answers that did not count


def make_suite(
    run: RunFile, name: str, sampler: Sampler, exclude: frozenset[bytes] = frozenset()
) -> EvalSuite:
    """Make the suite `name` of the run, without the problems whose fingerprints are in `exclude`.
    Raises ConfigError.
    """
    own = run.eval.envs[name]
    source = own.env or name
    env = make_eval_env(run, name)
    rewards = make_rewards(run.envs[source].rewards, f"envs.{source}.rewards")
    return EvalSuite(
        name=name,
        environment=source,
        own=own,
        problems=select_held_out(run, name, env, exclude),
        runner=RolloutRunner(env, sampling(run.envs[source], own), sampler, rewards),
    )


def sampling(env: EnvSettings, own: EvalEnv) -> FreelySampled:
    """The env's settings with the evaluation's own sampling parameters."""
    parameters = {
        "temperature": own.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k,
        "max_tokens": own.max_tokens,
    }
    given = {name: value for name, value in parameters.items() if value is not None}
    if own.temperature == 0:
        # A temperature of 0 has no logprobs. With top_k 1 the likeliest token is sampled as well.
        given |= {"temperature": 1.0, "top_k": 1}
    of_env = {name: getattr(env, name) for name in EnvSettings.model_fields}
    return FreelySampled.model_validate(of_env | given)


async def sample_answers(
    suite: EvalSuite, version: int, semaphore: AbstractAsyncContextManager[object]
) -> list[ProblemAnswers]:
    """The answers to all problems, in the order of the problems. `semaphore` is entered for each
    problem, and so limits how many problems are in flight.
    """

    async def sample(held: HeldOutProblem) -> ProblemAnswers:
        async with semaphore:
            return await sample_problem(suite, held, version)

    return await asyncio.gather(*[sample(held) for held in suite.problems])


async def sample_problem(suite: EvalSuite, held: HeldOutProblem, version: int) -> ProblemAnswers:
    """The wanted number of answers to one problem, or fewer after ROUNDS rounds."""
    task = Task(suite.name, held.number, "evaluator", held.problem)
    kept = list[Rollout]()
    repeated = 0
    for _ in range(ROUNDS):
        missing = suite.own.samples - len(kept)
        if not missing:
            break
        answers = await _ask(suite, task, missing, version)
        counting = [answer for answer in answers if counts(answer, version)]
        kept += counting
        repeated += len(answers) - len(counting)
    rollouts = [
        _with_unique_uid(answer, suite.name, version, index) for index, answer in enumerate(kept)
    ]
    return ProblemAnswers(rollouts, repeated)


async def _ask(suite: EvalSuite, task: Task, count: int, version: int) -> list[Rollout]:
    """`count` answers to a problem. Those that could not be sampled are failed rollouts."""
    try:
        return await suite.runner.run_group(task, count)
    except SamplingTimeout as error:
        cause = str(error)
        if count > 1:
            # A request for several answers is as late as its slowest one, so each gets its own.
            alone = await asyncio.gather(*[_ask(suite, task, 1, version) for _ in range(count)])
            return [answer for answers in alone for answer in answers]
    except SamplingFailed as error:
        cause = str(error)
    return [build_failed_rollout(task.name(index), cause, version) for index in range(count)]


def counts(rollout: Rollout, version: int) -> bool:
    """Whether the answer counts: it is of that version alone, or took too long."""
    return is_too_late(rollout.failure) or is_single_version(rollout, version)


def is_single_version(rollout: Rollout, version: int) -> bool:
    """Whether the rollout is complete, and every token of it was sampled by that version."""
    if rollout.failure or rollout.misaligned:
        return False
    return rollout.policy_version == rollout.newest_policy_version == version


def passes(rollout: Rollout, own: EvalEnv) -> bool:
    """Whether the answer counts as right: its reward, or the one that `own.reward` names, reaches
    `own.pass_at`. One that took too long is wrong.
    """
    if rollout.failure:
        return False
    reward = rollout.rewards.get(own.reward, -np.inf) if own.reward else rollout.reward
    return reaches(reward, own.pass_at)


def to_evaluation(
    suite: EvalSuite,
    version: PolicyVersion,
    answers: Sequence[ProblemAnswers],
    time_s: float,
    seconds: float,
) -> Evaluation:
    """The results of a version on a suite. `answers`: of each problem, in order; `time_s`: when the
    evaluation ended; `seconds`: how long it took.
    """
    own = suite.own
    settings = suite.runner.settings
    assert isinstance(settings, FreelySampled), "made by `sampling`"
    samples = np.array([len(a.rollouts) for a in answers], np.int32)
    passed = np.array(
        [sum(passes(rollout, own) for rollout in a.rollouts) for a in answers], np.int32
    )
    rewards = np.array([rollout.reward for a in answers for rollout in a.rollouts], np.float32)
    mean = mean_of_problems(samples, rewards)
    return Evaluation(
        name=suite.name,
        environment=suite.environment,
        learner=version.learner,
        version=version.version,
        sha256=version.sha256,
        problems=np.array([held.number for held in suite.problems], np.int64),
        samples=samples,
        passed=passed,
        rewards=rewards,
        pass_at=[_pass_at(samples, passed, k) for k in sorted(set(own.k))],
        reward_mean=mean.value,
        reward_low=mean.low,
        reward_high=mean.high,
        truncated=sum(rollout.truncated for a in answers for rollout in a.rollouts),
        repeated=sum(a.repeated for a in answers),
        too_slow=sum(bool(rollout.failure) for a in answers for rollout in a.rollouts),
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_tokens,
        seed=own.seed,
        time_s=time_s,
        seconds=seconds,
    )


def metrics(evaluation: Evaluation) -> Mapping[str, float]:
    """The metrics of an evaluation, by the names in `metric_names.py`."""
    values = {f"evals/{evaluation.name}/pass@{p.k}": p.value for p in evaluation.pass_at}
    return {
        **values,
        f"evals/{evaluation.name}/reward": evaluation.reward_mean,
        f"evals/{evaluation.name}/repeated": float(evaluation.repeated),
        f"evals/{evaluation.name}/too_slow": float(evaluation.too_slow),
    }


def _pass_at(samples: np.ndarray, passed: np.ndarray, k: int) -> PassAt:
    interval, problems = over_problems(samples, passed, k)
    return PassAt(
        k=k, problems=problems, value=interval.value, low=interval.low, high=interval.high
    )


def _with_unique_uid(rollout: Rollout, name: str, version: int, index: int) -> Rollout:
    """The rollout with ids that contain the version, and that no other answer to the problem has.
    Rounds number their rollouts from 0 again.
    """
    group = f"{name}-v{version}-{rollout.problem_id}"
    return structs.replace(rollout, group_id=group, rollout_uid=f"{group}-{index}")
