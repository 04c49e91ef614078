"""Tasks of reasoning-gym: the same problems in every process, and scores of any answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from streamrl.envs.api import Completion
from streamrl.envs.catalog import make_env
from streamrl.envs.shipped.reasoning_gym import CHUNK, ReasoningGym, Scorers
from tests.support.waiting import patience

ROOT = Path(__file__).parents[3]
# These iterate over sets of strings, so that the process that scores makes the problem of this one
# only under the same PYTHONHASHSEED.
OF_HASHES = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")


async def test_tasks_of_reasoning_gym_score_their_own_answers():
    scorers = Scorers(processes=1)
    worth = dict[tuple[str, str], float]()
    try:
        for task in (
            "chain_sum",
            "countdown",
            "spiral_matrix",
            "simple_integration",
            "bitwise_arithmetic",
            "prime_factorization",
        ):
            env = make_env("reasoning-gym", 3, {"task": task}, "envs.x")
            assert isinstance(env, ReasoningGym)
            env.scorers = scorers
            problem = env.problem(5)
            for text in (
                problem.answer["answer"],
                "nonsense",
                str(str(problem.answer["answer"]).split()),
            ):
                worth[task, text] = (await env.rewards(problem, Completion(f" {text}\n", True)))[
                    "score"
                ]
            assert worth[task, problem.answer["answer"]] == 1.0 and worth[task, "nonsense"] < 0.5, (
                worth
            )
            if task == "spiral_matrix":
                # a list of what was asked for, which the library evaluates
                assert worth[task, str(problem.answer["answer"].split())] == 0.1
        assert worth["prime_factorization", "nonsense"] == 0.0  # where it raises a ValueError
    finally:
        await scorers.close()


def test_problems_of_reasoning_gym_go_on_behind_a_chunk_and_differ_by_seed():
    one, again, next_seed = (
        make_env("reasoning-gym", seed, {"task": "list_functions"}, "envs.x") for seed in (1, 1, 2)
    )
    numbers = [0, 3, CHUNK - 1, CHUNK, CHUNK + 3, 10**9]
    posed = [one.problem(i).messages[-1]["content"] for i in numbers]
    assert posed == [again.problem(i).messages[-1]["content"] for i in reversed(numbers)][
        ::-1
    ] and len(set(posed)) == len(posed)
    shifted = [
        make_env(
            "reasoning-gym", seed, {"task": "chain_sum", "min_digits": 9, "max_digits": 9}, "envs.x"
        )
        for seed in (1, 2)
    ]
    assert not {shifted[0].problem(i).messages[-1]["content"] for i in range(50)} & {
        shifted[1].problem(i).messages[-1]["content"] for i in range(50)
    }
    assert next_seed.problem(0) != one.problem(0)


def test_a_task_that_draws_from_numpys_generator_poses_the_same_problem_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # codeio's programs write files
    env = make_env("reasoning-gym", 1, {"task": "codeio"}, "envs.x")
    posed = list[str]()
    for state in (1, 2, 3):
        np.random.seed(state)  # what went before must not matter
        posed.append(env.problem(214).messages[-1]["content"])
    assert "np.random" in posed[0] and len(set(posed)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(DATASETS))
async def test_every_task_of_reasoning_gym_poses_problems_and_scores_any_answer(task: str):
    if task in OF_HASHES:
        script = f"import asyncio, {__name__} as test; asyncio.run(test.pose_and_score({task!r}))"
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", script]
        subprocess.run(command, env=environment, cwd=ROOT, timeout=patience(120), check=True)
    else:
        await pose_and_score(task)


async def pose_and_score(task: str) -> None:
    parts = [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "leg_counting")]
    env = make_env(
        "reasoning-gym",
        1,
        {"task": task, **({"datasets": parts} if task == "composite" else {})},
        "envs.x",
    )
    for number in (0, CHUNK + 1):
        problem = env.problem(number)
        assert problem.messages[-1]["content"] and problem == env.problem(number)
        for text in ("", "nonsense"):  # where it halts, "nonsense" is a no
            assert 0 <= (await env.rewards(problem, Completion(text, True)))["score"] <= 1
    await env.close()
