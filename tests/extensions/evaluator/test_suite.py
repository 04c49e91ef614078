"""Exams taken by a policy that is made up: which answers count, how often one is asked, and what
they come to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.envs import Env, EnvSettings, FreelySampled
from streamrl.config.sections.serving import EvalEnv
from streamrl.extensions.evaluator import suite
from streamrl.extensions.evaluator.suite import (
    EvalSuite,
    ProblemAnswers,
    make_suite,
    metrics,
    passes,
    sample_answers,
    sampling,
)
from streamrl.inference.clients.client import (
    SampledCompletion,
    SamplingFailed,
    SamplingTimeout,
    is_too_late,
)
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import Evaluation, PolicyVersion, VersionSpan
from tests.support.build import floats, rollout, tokens

VERSION = 20
Spans = list[tuple[int, int]]  # version, tokens
WHOLE: Spans = [(VERSION, 3)]


class Policy:
    """Says what is asked of it, or wrongly, and by the versions that the test has put down for its
    next answers.
    """

    def __init__(self, spans: Sequence[Spans | str] = (), right: float = 1.0) -> None:
        self.spans = list(spans)
        self.right = right
        self.asked: list[int] = []
        self.env: FreelySampled | None = None
        self.in_flight = self.most = 0

    async def sample(
        self,
        messages: list[dict[str, Any]],
        n: int,
        env: EnvSettings,
        tools: Sequence[Mapping[str, Any]] = (),
        *more: object,
    ) -> list[SampledCompletion]:
        self.asked.append(n)
        self.env = env
        self.in_flight = self.in_flight + 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return [
            self._one(messages[-1]["content"].rstrip("="), i < self.right * n, env)
            for i in range(n)
        ]

    def usual(self) -> Spans:
        return WHOLE

    def _one(self, text: str, right: bool, env: FreelySampled) -> SampledCompletion:
        made = self.spans.pop(0) if self.spans else self.usual()
        if isinstance(made, str):
            raise SamplingFailed(made)
        ends = np.cumsum([count for _, count in made]).tolist()
        spans = [
            VersionSpan(version=version, start=end - count, end=end)
            for (version, count), end in zip(made, ends, strict=True)
        ]
        said = text if right else "x"
        return SampledCompletion(
            server_id="s",
            prompt_tokens=tokens(1, 8, 11, 15),
            tokens=tokens(8, 11, 2),
            logprobs=floats(-1, -1, -1),
            text=said,
            finish_reason="stop",
            version_spans=spans,
            latency_s=0.0,
            temperature=env.temperature,
            top_p=env.top_p,
            top_k=env.top_k,
            max_tokens=3,
        )


def run_file(**own: Any) -> RunFile:
    return parse(
        {
            "run": "r",
            "envs": {"copy-digits": {}},
            "eval": {"envs": {"held": {"env": "copy-digits", **own}}},
        }
    )


def taken(policy: Policy, **own: Any) -> tuple[EvalSuite, list[ProblemAnswers]]:
    made = make_suite(run_file(**own), "held", policy)
    return made, asyncio.run(sample_answers(made, VERSION, asyncio.Semaphore(2)))


def judged(policy: Policy, **own: Any) -> Evaluation:
    made, answers = taken(policy, **own)
    return suite.to_evaluation(
        made,
        PolicyVersion(learner="lead", version=VERSION, uri="u", size_bytes=1, sha256="ab"),
        answers,
        7.0,
        2.0,
    )


def test_what_is_right_is_counted_problem_by_problem():
    found = judged(Policy(right=0.5), problems=3, samples=4, k=[4, 1])
    assert (found.name, found.environment, found.version, found.sha256) == (
        "held",
        "copy-digits",
        VERSION,
        "ab",
    )
    assert (
        found.samples.tolist() == [4, 4, 4]
        and found.passed.tolist() == [2, 2, 2]
        and found.problems.tolist() == [0, 1, 2]
    )
    assert [(p.k, p.value, p.problems) for p in found.pass_at] == [(1, 0.5, 3), (4, 1.0, 3)]
    assert found.reward_mean == 0.5 and found.rewards.tolist() == [1, 1, 0, 0] * 3
    assert found.repeated == 0 and (found.time_s, found.seconds) == (7.0, 2.0)
    assert str(decode("evaluation/1", encode(found))) == str(found)
    assert metrics(found).keys() == {
        "evals/held/pass@1",
        "evals/held/pass@4",
        "evals/held/reward",
        "evals/held/repeated",
        "evals/held/too_slow",
    }


@pytest.mark.parametrize(
    "other",
    [
        [(VERSION, 2), (VERSION + 1, 1)],
        [(VERSION - 1, 1), (VERSION, 2)],
        [(VERSION + 1, 3)],
        [(VERSION - 1, 3)],
        "no answer",
    ],
)
def test_an_answer_that_is_not_of_the_version_counts_for_none_and_is_asked_for_again(
    other: Spans | str,
):
    policy = Policy([WHOLE, other, WHOLE])
    _, (answers,) = taken(policy, problems=1, samples=3)
    assert policy.asked[0] == 3 and sum(policy.asked) > 3 and answers.repeated >= 1
    assert [(r.policy_version, r.newest_policy_version) for r in answers.rollouts] == [
        (VERSION, VERSION)
    ] * 3
    assert [r.rollout_uid for r in answers.rollouts] == [f"held-v{VERSION}-0-{i}" for i in range(3)]


def test_only_what_is_missing_is_asked_for_again():
    policy = Policy([WHOLE, [(VERSION + 1, 3)], WHOLE, [(VERSION + 1, 3)]])
    _, (answers,) = taken(policy, problems=1, samples=3)
    assert policy.asked == [3, 1, 1] and answers.repeated == 2 and len(answers.rollouts) == 3


def test_a_problem_without_enough_answers_has_fewer_and_is_left_out_of_larger_k():
    """The first problem gets one answer of three, in as many rounds as there are; the
    second all.
    """
    policy = Policy([WHOLE, *[[(VERSION + 1, 3)]] * 2, *[WHOLE] * 3, *[[(VERSION + 1, 3)]] * 4])
    made, answers = taken(policy, problems=2, samples=3, k=[1, 2])
    counts = sorted(len(a.rollouts) for a in answers)
    assert counts == [1, 3] and policy.asked.count(2) == suite.ROUNDS - 1
    found = suite.to_evaluation(
        made,
        PolicyVersion(learner="lead", version=VERSION, uri="u", size_bytes=1, sha256="ab"),
        answers,
        0.0,
        0.0,
    )
    assert [(p.k, p.problems) for p in found.pass_at] == [(1, 2), (2, 1)] and found.repeated == 6


def test_not_all_problems_are_in_flight_at_once():
    policy = Policy()
    taken(policy, problems=9, samples=1)
    assert policy.most == 2


def test_sampling_parameters_are_its_own_or_the_envs():
    env = Env(temperature=0.7, max_tokens=5)
    of_env = sampling(env, EvalEnv())
    assert (of_env.temperature, of_env.max_tokens) == (0.7, 5)
    assert (of_env.top_p, of_env.top_k) == (1.0, -1)
    own = sampling(env, EvalEnv(temperature=0.3, top_p=0.9, top_k=20, max_tokens=9))
    assert (own.temperature, own.top_p, own.top_k, own.max_tokens) == (0.3, 0.9, 20, 9)
    greedy = sampling(env, EvalEnv(temperature=0))
    assert (greedy.temperature, greedy.top_k) == (1.0, 1)
    policy = Policy()
    assert judged(policy, problems=1, top_p=0.5, temperature=2.0).top_p == 0.5
    assert policy.env is not None and (policy.env.top_p, policy.env.temperature) == (0.5, 2.0)


def test_right_is_a_reward_from_a_limit_on():
    made = rollout(reward=0.8, rewards={"exact": 1.0, "short": 0.2})
    assert (
        not passes(made, EvalEnv())
        and passes(made, EvalEnv(pass_at=0.8))
        and passes(made, EvalEnv(reward="exact"))
    )
    assert not passes(made, EvalEnv(reward="nothing", pass_at=0.0))
    assert passes(rollout(reward=float(np.float32(0.1) * 10 - 1e-8)), EvalEnv())


LATE = "1 attempts failed; inference-0: no answer within 60 s"


class Slow(Policy):
    """Needs too long for the answers that it gives to a prompt for the `slow`-th time; a request
    with such an answer among others gets none of them in time.
    """

    def __init__(self, slow: Sequence[int]) -> None:
        super().__init__()
        self.slow = slow
        self.answers = 0

    async def sample(self, messages: list[dict[str, Any]], n: int, *more: Any) -> Any:
        first = self.answers
        self.answers += n
        if any(number in self.slow for number in range(first, first + n)):
            self.asked.append(n)
            raise SamplingTimeout(LATE)
        return await super().sample(messages, n, *more)


def test_an_answer_that_takes_too_long_is_wrong_and_the_others_of_its_request_are_not():
    """The request for four answers is late as a whole, so each is asked for alone: the second of
    these is late again.
    """
    policy = Slow([0, 5])
    found = judged(policy, problems=1, samples=4, k=[1, 4])
    assert policy.asked == [4, 1, 1, 1, 1]
    assert (found.samples.tolist(), found.passed.tolist()) == ([4], [3])
    assert found.rewards.tolist().count(0) == 1 and found.reward_mean == 0.75
    assert [(p.k, p.value, p.problems) for p in found.pass_at] == [(1, 0.75, 1), (4, 1.0, 1)]
    assert (found.too_slow, found.repeated) == (1, 0)


def test_problems_that_are_answered_too_slowly_stay_in_the_mean():
    """One of two problems is never answered in time. Even a limit of 0 does not make that right."""
    half = judged(Slow([0]), problems=2, samples=1, pass_at=0.0)
    assert (half.pass_at[0].value, half.pass_at[0].problems, half.too_slow) == (0.5, 2, 1)


@pytest.mark.parametrize(
    ("cause", "late"),
    [
        (LATE, True),
        ("2 attempts failed; a: no answer within 0.5 s; b: no answer within 0.5 s", True),
        ("no answer within 60 s", True),
        ("time", True),
        ("2 attempts failed; a: no answer within 60 s; b: connection refused", False),
        ("2 attempts failed; b: connection refused; a: no answer within 60 s", False),
        ("no server became ready within 60 s", False),
        ("its rewards took longer than 60 s", False),
        ("", False),
    ],
)
def test_only_what_the_policy_did_too_slowly_counts(cause: str, late: bool):
    assert is_too_late(cause) is late
    assert suite.counts(rollout(failure=cause), VERSION) is (late and cause != "")
