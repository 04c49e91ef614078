"""Any task of reasoning-gym: procedural problems with a verifier, made offline. `params: {task:
chain_sum, ...}`; the others go to the task.

Some of the library's scorers run what they are given: nine evaluate the answer as Python. So each
answer is scored in a process of its own that can only compute (`bounded.py`), and there `eval` and
SymPy's parser take nothing but plain expressions: an answer cannot name its own score.

Three tasks iterate over sets of strings: isomorphic_strings, polynomial_multiplication and
ransom_note give the same problems in another process only under the same PYTHONHASHSEED, which the
orchestrator sets; set it where you start such an env by hand.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import random
import sys
from functools import lru_cache
from typing import Any

import numpy as np
import reasoning_gym
import sympy
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from streamrl.envs.api import Answer, Problem
from streamrl.envs.engine import turns
from streamrl.envs.sandbox.subprocess_call import SubprocessCall

# problems of one dataset: the library's own default. Some tasks draw all their problems at once, or
# refuse more than 20,000
CHUNK = 500
HERE = "streamrl.envs.shipped.reasoning_gym"
# What an answer that is mathematics may call.
TRIGONOMETRIC = (
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
)
SPECIAL = (
    "erf",
    "erfi",
    "Si",
    "Ci",
    "Ei",
    "li",
    "sign",
    "Abs",
    "abs",
    "factorial",
    "Rational",
    "Integer",
    "Float",
    "Pow",
    "Mul",
    "Add",
)
FUNCTIONS = frozenset((*TRIGONOMETRIC, *SPECIAL, "exp", "log", "ln", "sqrt", "cbrt", "root"))


class ReasoningGym:
    """Reward: the task's own score of the answer, between 0 and 1. An answer of which there is none
    in time is a failed rollout.

    `scoring`: timeout_s, memory_mib, processes and allow_reading of the processes that score.
    """

    def __init__(
        self, seed: int, task: str, scoring: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, 3)
            raise ValueError(
                f"no task {task!r} among reasoning-gym's {len(DATASETS)}; near: {', '.join(near) or 'none'}"
            )
        # The library makes problem i from its seed + i: seeds 1 and 2 would share all problems but
        # one.
        self._task, self._first = task, random.Random(f"{task} {seed}").randrange(2**31)
        self._settings = json.dumps(kwargs)
        dataset(task, self._settings, self._first)  # which refuses settings that it does not take
        self.scorers = Scorers(**(scoring or {}))

    def problem(self, index: int) -> Problem:
        found = entry(self._task, self._settings, self._first, index)
        return Problem([{"role": "user", "content": found["question"]}], {**found, "index": index})

    async def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        which = (
            self._task,
            self._settings,
            self._first,
            problem.answer["index"],
            problem.answer["question"],
        )
        return {"score": await self.scorers(*which, answer.text.strip())}

    async def close(self) -> None:
        await self.scorers.close()


class Scorers:
    """The processes that score, as many at once as there are."""

    def __init__(
        self,
        timeout_s: float = 10.0,
        memory_mib: int = 4096,
        processes: int = 2,
        allow_reading: bool = False,
    ) -> None:
        if timeout_s <= 0 or memory_mib < 1024 or processes < 1:
            raise ValueError(
                f"scoring: timeout_s {timeout_s:g}, memory_mib {memory_mib}, processes {processes}: need more than 0, 1024 and 1"
            )
        make = [
            SubprocessCall(
                f"{HERE}:score", timeout_s, memory_mib, f"{HERE}:prepared", allow_reading
            )
            for _ in range(processes)
        ]
        self._all = make
        # one that has started before the others
        self._idle: asyncio.LifoQueue[SubprocessCall] = asyncio.LifoQueue()
        for scorer in make:
            self._idle.put_nowait(scorer)

    async def __call__(self, *arguments: Any) -> float:
        async with turns.taken(self._idle) as scorer:
            return float(await scorer(*arguments))

    async def close(self) -> None:
        for scorer in self._all:
            await scorer.close()


@lru_cache(maxsize=3)
def dataset(task: str, settings: str, first: int, chunk: int = 0) -> Any:
    """Problems chunk * CHUNK and on. `settings`: JSON."""
    kwargs = json.loads(settings)
    if task == "composite":  # the one task whose settings are objects
        kwargs["datasets"] = [DatasetSpec(**spec) for spec in kwargs.get("datasets", [])]
    return reasoning_gym.create_dataset(
        task, seed=(first + chunk * CHUNK) % 2**31, size=CHUNK, **kwargs
    )


@lru_cache(maxsize=64)
def entry(task: str, settings: str, first: int, index: int) -> dict[str, Any]:
    """The library's own record of a problem."""
    # a task may draw from the global generators too (list_functions does; codeio from numpy's)
    random.seed(first + index)
    np.random.seed((first + index) % 2**32)
    return dataset(task, settings, first, index // CHUNK)[index % CHUNK]


def prepared(task: str, settings: str, first: int, index: int, question: str) -> None:
    """Before the answer is there: the problem, made again."""
    made = entry(task, settings, first, index)["question"]
    if made != question:
        raise ValueError(
            f"{task} makes another problem {index} in another process; start the env with PYTHONHASHSEED set"
        )
    dataset(task, settings, first)


def score(task: str, settings: str, first: int, index: int, question: str, answer: str) -> float:
    """What the task's verifier says: 0 where it stumbles over an answer that it cannot parse, as
    several do over a wrong one.

    It depends on the task's settings, not on the chunk. The process ends with the call.
    """
    found, verifier = entry(task, settings, first, index), dataset(task, settings, first)
    for module in [
        module for name, module in sys.modules.items() if name.startswith("reasoning_gym.")
    ]:
        for name in [name for name, value in vars(module).items() if value is SYMPY_PARSER]:
            setattr(module, name, parsed)
        vars(module)["eval"] = evaluated
    sympy.parse_expr = parsed
    try:
        return float(verifier.score_answer(answer, found))
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        return 0.0


SYMPY_PARSER = sympy.parse_expr
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
LITERAL = (*ARITHMETIC, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.expr_context)


def parsed(text: str, *arguments: Any, **settings: Any) -> Any:
    """SymPy's parser, which evaluates Python, of mathematics only. Raises ValueError for anything
    else.
    """
    for node in ast.walk(ast.parse(text.replace("!", "").strip(), mode="eval")):
        match node:
            case ast.Constant(value=value):
                fine = type(value) in (int, float)
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                fine = name in FUNCTIONS
            case ast.Name(id=name):
                fine = name in FUNCTIONS or len(name) <= 3
            case _:
                fine = isinstance(node, (*ARITHMETIC, ast.expr_context))
        if not fine:
            raise ValueError(f"{type(node).__name__} is no part of an expression that is evaluated")
    return SYMPY_PARSER(text, *arguments, **settings)


def evaluated(text: str) -> Any:
    """Python's `eval` of numbers, text, arithmetic, and lists of them. Raises ValueError for
    anything else.
    """
    tree = ast.parse(text.strip(), mode="eval")
    if bad := [node for node in ast.walk(tree) if not isinstance(node, LITERAL)]:
        raise ValueError(f"{type(bad[0]).__name__} is no part of an expression that is evaluated")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})
