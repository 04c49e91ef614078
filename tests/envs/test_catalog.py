"""Envs by name: shipped ones and your own, and what is said of a name or a class that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import choices
from streamrl.config.run_file import RunFile
from streamrl.envs.api import (
    AgentLoopEnv,
    Completion,
    Message,
    MultiTurnEnv,
    PolicyClient,
    Problem,
    SingleTurnEnv,
)
from streamrl.envs.catalog import (
    ENVS,
    env_class,
    known_envs,
    make_env,
    make_reward,
    resolve_env,
)
from streamrl.system.errors import ConfigError
from tests.support.packages import install
from tests.support.waiting import patience

HERE = "tests.envs.test_catalog"
GYM = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
EXAMPLES = Path(__file__).parents[2] / "examples"
PARAMS = {
    **{kind: {} for kind in ENVS},
    "reasoning-gym": GYM,
    "dataset": {"file": str(EXAMPLES / "three-digits.jsonl")},
    "demonstrations": {"file": str(EXAMPLES / "agents" / "calculator.jsonl")},
}


class Adding(SingleTurnEnv):
    def problem(self, number: int) -> Problem:
        return Problem([], number)

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {}


class Misspelt(Adding, MultiTurnEnv):
    def repyl(self, problem: Problem, messages: Sequence[Message]) -> None: ...


class MisspeltOptional(Adding):
    async def clsoe(self) -> None: ...


class OfAnotherKind(Adding):
    def reply(self, problem: Problem, messages: Sequence[Message]) -> None: ...


class Half(AgentLoopEnv):
    def problem(self, number: int) -> Problem:
        return Problem([])

    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        await ask(problem.messages)


class OwnMethods(Adding):
    """Methods of its own that are like none of ours."""

    def _replay(self) -> None: ...

    def next_number(self) -> None: ...


def test_a_run_file_knows_which_shipped_envs_have_several_turns():
    several = [kind for kind in ENVS if issubclass(env_class(kind, ""), MultiTurnEnv)]
    assert several == [*choices.MULTI_TURN_ENVS], (
        "MULTI_TURN_ENVS of streamrl/config/choices.py differs from the MultiTurnEnvs in ENVS, or"
        " is in another order"
    )
    loops = [kind for kind in ENVS if issubclass(env_class(kind, ""), AgentLoopEnv)]
    assert loops == ["demonstrations"]  # in which nothing is sampled that could be lost


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Misspelt", "has a method 'repyl' that nothing calls; did you mean 'reply'?"),
        ("MisspeltOptional", "has a method 'clsoe' that nothing calls; did you mean 'close'?"),
        ("OfAnotherKind", "has a method 'reply', but is a SingleTurnEnv; derive it from MultiTurn"),
        ("Half", "has no method 'judge', which every AgentLoopEnv has"),
    ],
)
def test_a_class_whose_methods_do_not_fit_its_kind_is_refused(name: str, says: str):
    with pytest.raises(ConfigError, match=f"^envs.x: class '{name}' of {HERE} ") as refused:
        env_class(f"{HERE}:{name}", "envs.x")
    assert says in str(refused.value)


@pytest.mark.parametrize("kind", [*ENVS, f"{HERE}:Adding", f"{HERE}:OwnMethods"])
def test_a_class_whose_methods_fit_its_kind_is_accepted(kind: str):
    assert issubclass(env_class(kind, "envs.x"), SingleTurnEnv | AgentLoopEnv)


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        (
            "copy-digit",
            {},
            (
                f"env 'copy-digit' not found; there are {', '.join(ENVS)};"
                " did you mean 'copy-digits'"
            ),
        ),
        ("nowhere.py:Mine", {}, "no file nowhere.py"),
        ("no.such.module:Mine", {}, "cannot be loaded"),
        ("streamrl.envs.shipped.copy_digits:Nope", {}, "has no class 'Nope'"),
        ("copy-digits", {"digit": 3}, "takes no 'digit'; did you mean 'digits'"),
        ("copy-digits", {"digits": 0}, "digits is 0; at least 1 is needed"),
        ("reasoning-gym", {"task": "chain_sums"}, "no task 'chain_sums'.*chain_sum"),
        ("reasoning-gym", {"task": "chain_sum", "terms": 3}, "refuses them.*terms"),
        ("reasoning-gym", {}, "refuses them.*task"),
        (
            "reasoning-gym",
            {"task": "chain_sum", "min_terms": -1},
            "refuses them: AssertionError: min_terms must be positive",
        ),
        ("reasoning-gym", {"task": "chain_sum", "size": 10}, "refuses them.*size"),
        ("streamrl.envs.api:Problem", {}, "does not derive from a kind of env; derive it from"),
        ("streamrl.envs.api:BaseEnv", {}, "does not derive from a kind of env"),
        ("streamrl.envs.catalog:make_env", {}, "has no class 'make_env'"),
    ],
)
def test_what_is_not_found_is_named(kind: str, params: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=f"^envs.x.*{says}"):
        make_env(kind, 0, params, "envs.x")


def test_an_env_of_ones_own_by_file_and_by_module(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text((Path(__file__).parents[2] / "examples" / "reverse_digits.py").read_text())
    env = make_env(f"{file}:ReverseDigits", 0, {"digits": 3}, "envs.x")
    problem = env.problem(0)
    assert problem.messages[0]["content"][:3] == problem.answer[::-1]
    assert (
        make_env("streamrl.envs.shipped.copy_digits:CopyDigits", 0, {}, "envs.x").problem(0).answer
    )


def test_a_file_may_define_dataclasses_and_hides_no_module(tmp_path: Path):
    file = tmp_path / "random.py"  # as a module of the library is called
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom"
        " streamrl.envs.api import Problem, SingleTurnEnv\n@dataclass\nclass Mine(SingleTurnEnv):\n"
        "    seed: int\n    word: str = 'a'\n    def problem(self, number): return Problem([],"
        " self.word * number)\n    def rewards(self, problem, completion): return {}\n"
    )
    assert make_env(f"{file}:Mine", 0, {"word": "b"}, "envs.x").problem(3).answer == "bbb"
    assert make_env("copy-digits", 0, {}, "envs.x").problem(0).answer


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


def test_another_process_poses_the_same_problems():
    script = """if True:
        from streamrl.envs.catalog import make_env
        params = {"copy-digits": {}, "add-digits": {}, "reasoning-gym": {"task": "chain_sum"}}
        for kind, params in params.items():
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


def test_an_env_is_named_by_its_kind_too():
    run = RunFile.model_validate(
        {
            "run": "r",
            "envs": {
                "a": {"kind": "own.py:Env"},
                "b": {"kind": "own.py:Other"},
                "c": {"kind": "own.py:Other"},
            },
        }
    )
    assert resolve_env(run, "a") == resolve_env(run, "own.py:Env") == "a"
    with pytest.raises(ConfigError, match="several envs 'own.py:Other'"):
        resolve_env(run, "own.py:Other")
    with pytest.raises(ConfigError, match="no env 'd'"):
        resolve_env(run, "d")


def test_envs_and_rewards_of_an_installed_package_have_short_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = """
from streamrl.envs.api import Problem, SingleTurnEnv

class Echo(SingleTurnEnv):
    def __init__(self, seed, word="a"):
        self.word = word

    def problem(self, number):
        return Problem([{"role": "user", "content": self.word}], answer=self.word)

    def rewards(self, problem, completion):
        return {"same": float(completion.text == problem.answer)}

def brief(problem, completion, rewards):
    return 1.0
"""
    install(
        monkeypatch,
        tmp_path,
        "echoes",
        code,
        envs={"echo": "echoes:Echo", "dataset": "echoes:Echo"},
        rewards={"brief": "echoes:brief"},
    )
    assert make_env("echo", 0, {"word": "b"}, "envs.x").problem(0).answer == "b"
    assert make_reward("brief", {}, "envs.x.rewards.brief")(None, None, {}) == 1.0  # type: ignore
    assert known_envs()["dataset"].package == "streamrl", "a shipped name stays what it is"
    with pytest.raises(ConfigError, match="there are .*echo.*did you mean 'echo'"):
        make_env("ecko", 0, {}, "envs.x")
