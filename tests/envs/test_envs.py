"""The shipped envs, and how one is found: problems that do not depend on who asks, rewards worked
by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from streamrl.envs.api import Completion
from streamrl.envs.catalog import ENVS, make_env
from streamrl.envs.shipped.reasoning_gym import CHUNK, ReasoningGym, Scorers
from tests.support.waiting import patience

GYM = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
FILE = Path(__file__).parents[2] / "examples" / "three-digits.jsonl"
PARAMS = {**{kind: {} for kind in ENVS}, "reasoning-gym": GYM, "dataset": {"file": str(FILE)}}


@pytest.mark.parametrize("kind", ENVS)
def test_a_problem_follows_from_seed_and_index_alone(kind: str):
    env, again, other = (make_env(kind, seed, PARAMS[kind], "envs.x") for seed in (1, 1, 2))
    posed = [env.problem(i).messages for i in range(20)]
    assert posed == [again.problem(i).messages for i in reversed(range(20))][::-1]
    if kind == "guess-number":  # asked alike, the number is another
        numbers, others = ([env.problem(i).answer for i in range(20)] for env in (env, other))
        assert numbers != others and len(set(numbers)) > 5
    else:
        assert (
            posed != [other.problem(i).messages for i in range(20)]
            and len({str(p) for p in posed}) > 5
        )


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [
        ("47", True, 1.0),
        ("47", False, 2 / 3),
        ("4", True, 1 / 3),
        ("74", True, 1 / 3),
        ("4<pad>", True, 2 / 3),
        ("477", True, 2 / 3),
        ("", True, 0.0),
    ],
)
def test_copying_is_rewarded_by_positions_the_end_among_them(
    text: str, finished: bool, reward: float
):
    env = make_env("copy-digits", 0, {"digits": 2}, "envs.x")
    problem = env.problem(0)._replace(answer="47")
    assert env.rewards(problem, Completion(text, finished)) == {"positions": pytest.approx(reward)}


@pytest.mark.parametrize(
    ("text", "finished", "reward"),
    [("1", True, 1.0), ("1", False, 0.5), ("2", True, 0.5), ("11", True, 0.5)],
)
def test_adding_is_rewarded_for_the_last_digit_and_the_end(
    text: str, finished: bool, reward: float
):
    env = make_env("add-digits", 0, {}, "envs.x")
    problem = env.problem(0)
    first, second = (int(c) for c in problem.messages[0]["content"] if c.isdigit())
    assert problem.answer == str((first + second) % 10)
    assert env.rewards(problem._replace(answer="1"), Completion(text, finished)) == {
        "positions": reward
    }


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
    posed = [one.problem(i).messages[0]["content"] for i in numbers]
    assert posed == [again.problem(i).messages[0]["content"] for i in reversed(numbers)][
        ::-1
    ] and len(set(posed)) == len(posed)
    shifted = [
        make_env(
            "reasoning-gym", seed, {"task": "chain_sum", "min_digits": 9, "max_digits": 9}, "envs.x"
        )
        for seed in (1, 2)
    ]
    assert not {shifted[0].problem(i).messages[0]["content"] for i in range(50)} & {
        shifted[1].problem(i).messages[0]["content"] for i in range(50)
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
        posed.append(env.problem(214).messages[0]["content"])
    assert "np.random" in posed[0] and len(set(posed)) == 1


def test_another_process_poses_the_same_problems():
    script = """if True:
        from streamrl.envs.catalog import make_env
        for kind, params in (("copy-digits", {}), ("add-digits", {}), ("reasoning-gym", {"task": "chain_sum"})):
            print([make_env(kind, 1, params, "envs.x").problem(i).messages for i in range(20)])
    """
    root = Path(__file__).parents[2]
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != ""


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(DATASETS))
async def test_every_task_of_reasoning_gym_poses_problems_and_scores_any_answer(task: str):
    parts = [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "leg_counting")]
    env = make_env(
        "reasoning-gym",
        1,
        {"task": task, **({"datasets": parts} if task == "composite" else {})},
        "envs.x",
    )
    for number in (0, CHUNK + 1):
        problem = env.problem(number)
        assert problem.messages[0]["content"] and problem == env.problem(number)
        for text in ("", "nonsense"):  # where it halts, "nonsense" is a no
            assert 0 <= (await env.rewards(problem, Completion(text, True)))["score"] <= 1
    await env.close()
