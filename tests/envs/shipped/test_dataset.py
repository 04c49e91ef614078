"""The env of a file: its order, its rewards, what it publishes of a problem, and prompts that are
token ids.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Completion, MultiTurnEnv, Problem
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.problems import ProblemError, make_problem
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.inference.clients.client import SampledCompletion
from streamrl.inference.clients.prefix import NO_PREFIX, Prefix
from streamrl.stream.records import VersionSpan
from streamrl.system.errors import ConfigError
from tests.support.build import floats, tokens


def dataset(directory: Path, rows: list[dict[str, Any]], **params: Any) -> Any:
    file = directory / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return make_env("dataset", params.pop("seed", 0), {"file": str(file), **params}, "envs.x")


ROWS = [{"prompt": f"{i}+1=?", "gt_answer": str(i + 1), "level": i % 2} for i in range(10)]


def test_each_problem_once_an_epoch_and_the_same_in_every_process(tmp_path: Path):
    env, again, other = (dataset(tmp_path, ROWS, seed=seed) for seed in (1, 1, 2))
    answers = [
        [env.problem(i).answer for i in range(10 * epoch, 10 * epoch + 10)] for epoch in range(2)
    ]
    assert (
        all(sorted(map(int, epoch)) == list(range(1, 11)) for epoch in answers)
        and answers[0] != answers[1]
    )
    assert (
        [again.problem(i).answer for i in range(20)]
        == answers[0] + answers[1]
        != [other.problem(i).answer for i in range(20)]
    )


def test_what_is_known_of_a_problem_goes_with_its_rollouts(tmp_path: Path):
    env = dataset(tmp_path, ROWS, keep=["level"], instruction="A number only.")
    problem = env.problem(13)
    which = int(problem.answer) - 1
    assert problem.messages == [{"role": "user", "content": f"{which}+1=?\nA number only."}]
    assert problem.metadata == {"level": which % 2, "line": which + 1, "epoch": 1}
    assert env.dataset_index(13) == (1, which)


@pytest.mark.parametrize(
    ("reward", "right", "said", "earned"),
    [
        ("exact", "7", " 7\n", {"correct": 1.0}),
        ("exact", "7", "7.0", {"correct": 0.0}),
        ("positions", "47", "41", {"positions": 2 / 3}),
        ("none", "47", "47", {}),
        ("math-verify", "1/2", r"so it is $\frac{2}{4}$", {"correct": 1.0}),
        ("math-verify", "1/2", "0.4", {"correct": 0.0}),
    ],
)
def test_rewards(reward: str, right: str, said: str, earned: dict[str, float], tmp_path: Path):
    async def judged() -> Any:
        env = dataset(
            tmp_path, [{"prompt": "?", "gt_answer": right}], reward=reward, timeout_s=30.0
        )
        try:
            return await env.rewards(env.problem(0), Completion(said, True))
        finally:
            await env.close()

    assert asyncio.run(judged()) == pytest.approx(earned)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"reward": "math-verfy"}, r"no reward 'math-verfy'; did you mean 'math-verify'\?"),
        (
            {"columns": {"answer": "answer"}},
            (
                r"problems.jsonl:1: no 'answer'; it has prompt, gt_answer, level; lines 2, 3, 4, 5,"
                r" 6 neither \(10 in all\)"
            ),
        ),
        ({"answr": "boxed"}, r"dataset takes no 'answr'; did you mean 'answer'\?"),
        ({"answer": "box"}, r"no place 'box' of an answer; did you mean 'boxed'\?"),
        ({"columns": {"promt": "q"}}, r"columns has 'promt'; did you mean 'prompt'\?"),
    ],
)
def test_what_cannot_be_is_said_with_the_setting(params: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"^envs.x.params: .*{says}"):
        dataset(tmp_path, ROWS, **params)


def test_a_right_answer_that_is_not_equal_to_itself_is_refused_with_its_line(tmp_path: Path):
    rows = [
        ROWS[0],
        {"prompt": "?", "gt_answer": r"\boxed{3"},
        {"prompt": "?", "gt_answer": "#### "},
    ]
    says = (
        r"problems.jsonl:2: the right answer '.*boxed{3' is of no use: math-verify takes it for"
        " different from itself; line 3 neither"
    )
    with pytest.raises(ConfigError, match=says):
        dataset(tmp_path, rows)
    assert dataset(tmp_path, rows, reward="exact").problem(0)


def test_an_instruction_goes_to_the_last_message_of_the_user(tmp_path: Path):
    system = {"role": "system", "content": "Add."}
    asked = {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}
    called = {"role": "assistant", "content": "[2+2]"}
    result = {"role": "tool", "content": "4"}
    row = {"prompt": [system, asked, called, result], "gt_answer": 4}
    env = dataset(tmp_path, [row], instruction="A number.")
    told = {"role": "user", "content": "2+2?\nA number."}
    assert env.problem(0).messages == [system, told, called, result]
    with pytest.raises(ConfigError, match="problems.jsonl:1: no message of a user"):
        dataset(tmp_path, [{"prompt": [system], "gt_answer": 4}], instruction="A number.")


def test_a_structure_for_functions_of_the_run_file_stays_one(tmp_path: Path):
    env = dataset(tmp_path, [{"prompt": "?", "gt_answer": {"tests": [1]}}], reward="none")
    assert env.problem(0).answer == {"tests": [1]}


def test_an_instruction_cannot_follow_token_ids(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"problems.jsonl:2: an instruction cannot follow a prompt of token ids"
    ):
        dataset(
            tmp_path,
            [ROWS[0], {"input_token_ids": [1, 2], "gt_answer": "3"}],
            instruction="Say it.",
        )


class Sampler:
    """Answers `47` behind whatever it is given, and remembers that."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def sample(
        self,
        messages: list[dict[str, Any]],
        n: int,
        env: Env,
        tools: object = (),
        prefix: Prefix = NO_PREFIX,
    ) -> list[SampledCompletion]:
        self.asked.append((messages, list(prefix.tokens)))
        prompt = tokens(*prefix.tokens) if prefix.tokens else tokens(1, 2)
        spans = [VersionSpan(version=0, start=0, end=3)]
        return [
            SampledCompletion(
                server_id="s",
                prompt_tokens=prompt,
                tokens=tokens(8, 11, 2),
                logprobs=floats(-1, -1, -1),
                text="47",
                finish_reason="stop",
                version_spans=spans,
                latency_s=0.0,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_tokens=3,
            )
            for _ in range(n)
        ]


def test_token_ids_are_the_prompt_and_train_as_such(tmp_path: Path):
    env = dataset(
        tmp_path,
        [{"input_token_ids": [1, 9, 4], "prompt": "47=", "gt_answer": "47"}],
        reward="exact",
    )
    sampler = Sampler()
    task = Task("x", 0, "x-0", make_problem(env, 0))
    rollouts = asyncio.run(RolloutRunner(env, Env(), sampler).run_group(task, 2))
    assert sampler.asked == [([], [1, 9, 4])]
    for rollout in rollouts:
        asked, said = rollout.turns
        assert (
            asked.tokens is not None
            and asked.tokens.tolist() == [1, 9, 4]
            and asked.message == "47="
            and not asked.fork
        )
        assert (
            said.tokens is not None and said.tokens.tolist() == [8, 11, 2] and rollout.reward == 1.0
        )
        assert rollout.metadata == {"line": 1, "epoch": 0}


def test_an_env_that_replies_takes_no_token_ids():
    class Talks(MultiTurnEnv):
        def problem(self, number: int) -> Problem:
            return Problem([], "", tokens=[1, 2])

        def reply(self, problem: Problem, messages: object) -> None: ...

        def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
            return {}

    with pytest.raises(
        ProblemError, match="a prompt of token ids is for one turn, and this env has several"
    ):
        make_problem(Talks(), 0)  # type: ignore[arg-type]
