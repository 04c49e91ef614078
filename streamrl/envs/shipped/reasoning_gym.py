"""Any task of reasoning-gym: procedural problems with a verifier, made offline.

`params: {task: chain_sum, ...}` names the task; the other parameters go to it.

Some of the library's scorers run what they are given: nine evaluate the answer as Python. Each
answer is therefore scored in a separate process that can only compute
(`sandbox/subprocess_call.py`), and in that process `eval` and SymPy's parser accept nothing but
plain expressions. An answer cannot name its own score.

The tasks isomorphic_strings, polynomial_multiplication and ransom_note iterate over sets of
strings, so they pose the same problems in another process only under the same PYTHONHASHSEED. The
orchestrator sets it. Set it yourself if you start such an env by hand.
"""

from __future__ import annotations

import ast
import difflib
import json
import random
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import reasoning_gym
import sympy
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.subprocess_call import SubprocessPool
from streamrl.envs.shipped.answers import AnswerPlace, answer_in, check_place
from streamrl.envs.shipped.math_text import stated_text
from streamrl.system.text import nearest_or_all

# Problems of one dataset: the library's own default. Some tasks draw all their problems at once, or
# refuse more than 20,000.
CHUNK = 500
HERE = "streamrl.envs.shipped.reasoning_gym"
# The functions that an answer may call, if it is mathematics.
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


class ReasoningGym(SingleTurnEnv):
    """The reward is the task's own score of the answer, between 0 and 1. A rollout fails if its
    answer is not scored in time, and an answer that is cut off scores 0.

    `answer` is where the answer is read (`answers.py`): in the last <answer>, as the library's
    `extract_answer` does, or without one what the text states after the thoughts. `system` names
    one of the library's system prompts, which ask for that tag; empty means none. Another place has
    no system prompt unless one is named.

    `scoring` has timeout_s, memory_mib, processes and allow_reading of the processes that score.
    """

    def __init__(
        self,
        seed: int,
        task: str,
        scoring: dict[str, Any] | None = None,
        answer: AnswerPlace = "tag",
        system: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_place(answer)
        if system is None:
            system = "default" if answer == "tag" else ""
        if system and system not in SYSTEM_PROMPTS:
            hint = nearest_or_all(system, SYSTEM_PROMPTS)
            raise ValueError(f"no system prompt {system!r} of reasoning-gym; {hint}")
        self.answer: AnswerPlace = answer
        self._system = SYSTEM_PROMPTS[system].strip() if system else ""
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, 3)
            raise ValueError(
                f"no task {task!r} among reasoning-gym's {len(DATASETS)}; "
                f"near: {', '.join(near) or 'none'}"
            )
        self._task = task
        # The library makes problem i from its seed + i, so seeds 1 and 2 would share all problems
        # but one.
        self._first = random.Random(f"{task} {seed}").randrange(2**31)
        self._settings = json.dumps(kwargs)
        dataset(task, self._settings, self._first)  # refuses settings that it does not take
        self.scorers = Scorers(**(scoring or {}))

    def problem(self, number: int) -> Problem:
        record = entry(self._task, self._settings, self._first, number)
        messages = [{"role": "user", "content": record["question"]}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        return Problem(messages, {**record, "index": number})

    async def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        answer = answer_in(completion, self.answer)
        if answer is None and self.answer == "tag":
            answer = untagged_answer(completion)
        if answer is None:
            return {"score": 0.0}
        score = await self.scorers(
            self._task,
            self._settings,
            self._first,
            problem.answer["index"],
            problem.answer["question"],
            answer,
        )
        return {"score": float(score)}

    async def close(self) -> None:
        await self.scorers.close()


def untagged_answer(completion: Completion) -> str | None:
    """The answer of a text without a tag: what it states to be the answer, or all that follows the
    thoughts. None if the text is cut off, or opens a tag.
    """
    text = answer_in(completion, "after-think")
    if text is None or "<answer>" in text:
        return None
    stated = stated_text(text)
    return text if stated is None else stated


class Scorers(SubprocessPool):
    """The processes that score; each scores one answer at a time."""

    def __init__(
        self,
        timeout_s: float = 10.0,
        memory_mib: int = 4096,
        processes: int = 2,
        allow_reading: bool = False,
    ) -> None:
        if timeout_s <= 0 or memory_mib < 1024 or processes < 1:
            raise ValueError(
                f"scoring: timeout_s {timeout_s:g}, memory_mib {memory_mib}, "
                f"processes {processes}: need more than 0, 1024 and 1"
            )
        super().__init__(
            f"{HERE}:score",
            SandboxLimits(timeout_s, memory_mib, allow_reading),
            prepare=f"{HERE}:prepared",
            processes=processes,
        )


@lru_cache(maxsize=3)
def dataset(task: str, settings: str, first: int, chunk: int = 0) -> Any:
    """The problems from chunk * CHUNK on. `settings` is JSON."""
    kwargs = json.loads(settings)
    if task == "composite":  # the one task whose settings are objects
        kwargs["datasets"] = [DatasetSpec(**spec) for spec in kwargs.get("datasets", [])]
    return reasoning_gym.create_dataset(
        task, seed=(first + chunk * CHUNK) % 2**31, size=CHUNK, **kwargs
    )


@lru_cache(maxsize=64)
def entry(task: str, settings: str, first: int, number: int) -> dict[str, Any]:
    """The library's own record of problem `number`."""
    # some tasks draw from the global generators: list_functions from Python's, codeio from numpy's
    random.seed(first + number)
    np.random.seed((first + number) % 2**32)
    return dataset(task, settings, first, number // CHUNK)[number % CHUNK]


def prepared(task: str, settings: str, first: int, number: int, question: str) -> None:
    """Make the problem again, before the answer is there, so that scoring finds it in the cache."""
    again = entry(task, settings, first, number)["question"]
    if again != question:
        raise ValueError(
            f"{task} makes another problem {number} in another process; "
            "start the env with PYTHONHASHSEED set"
        )
    dataset(task, settings, first)


def score(task: str, settings: str, first: int, number: int, question: str, answer: str) -> float:
    """The score that the task's verifier gives. It is 0 if the verifier stumbles over an answer
    that it cannot parse, as several do over a wrong one.

    The score depends on the settings of the task, not on the chunk. This replaces functions of the
    library, which is safe because the process ends with the call.
    """
    record = entry(task, settings, first, number)
    verifier = dataset(task, settings, first)
    for name, module in [*sys.modules.items()]:
        if name.startswith("reasoning_gym."):
            _replace_parsers(module)
    sympy.parse_expr = parsed
    try:
        return float(verifier.score_answer(answer, record))
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        return 0.0


def _replace_parsers(module: ModuleType) -> None:
    """Let a module of the library parse expressions by the functions below."""
    for name, value in [*vars(module).items()]:
        if value is SYMPY_PARSER:
            setattr(module, name, parsed)
    vars(module)["eval"] = evaluated


SYMPY_PARSER = sympy.parse_expr
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
LITERAL = (*ARITHMETIC, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.expr_context)


def parsed(text: str, *arguments: Any, **settings: Any) -> Any:
    """What SymPy's parser makes of a text that is mathematics. That parser evaluates Python, so
    this raises ValueError for anything else.
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
    """What Python's `eval` makes of numbers, text, arithmetic, and lists of them. Raises ValueError
    for anything else.
    """
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, LITERAL):
            raise ValueError(f"{type(node).__name__} is no part of an expression that is evaluated")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})
