"""Problems that are kept for evaluation. Training poses none of them, nor any with the same text
under another number.

Comparing numbers would not do. An env may pose one problem under many numbers: there are a hundred
pairs of digits, and a file is read again each epoch. A problem is therefore known by its text,
and has the same fingerprint in an env and in its evaluation, which may be constructed with another
seed or other parameters.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from streamrl.config.run_file import RunFile
from streamrl.envs.api import BaseEnv, Problem
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.problems import ProblemError, make_problem
from streamrl.envs.sessions.messages import joined_text
from streamrl.stream.records import Turn
from streamrl.stream.records.compact import wide_ids
from streamrl.system.errors import ConfigError

# How many numbers are tried for each problem that is wanted. An env that poses nothing new for so
# long is taken to have no more problems.
TRIED_PER_PROBLEM = 200


class HeldOutProblem(NamedTuple):
    """A problem that is kept for evaluation, and its number."""

    number: int
    problem: Problem


def text_fingerprint(text: str) -> bytes:
    """The fingerprint of a problem that is posed as this text."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "replace"))


def tokens_fingerprint(tokens: Sequence[int] | np.ndarray) -> bytes:
    """The fingerprint of a problem that is posed as these token ids."""
    return xxhash.xxh3_128_digest(b"tokens" + np.asarray(tokens, "<u4").tobytes())


def problem_fingerprint(problem: Problem) -> bytes:
    """The fingerprint of a problem: of its token ids if it has them, otherwise of its messages."""
    if len(problem.tokens):
        return tokens_fingerprint(problem.tokens)
    return text_fingerprint(joined_text(problem.messages))


def possible_fingerprints(first_turn: Turn) -> list[bytes]:
    """The fingerprints of the problems that a rollout with this first turn may have answered."""
    fingerprints = [text_fingerprint(first_turn.message)]
    if first_turn.tokens is not None:
        fingerprints.append(tokens_fingerprint(wide_ids(first_turn.tokens)))
    return fingerprints


def first_distinct(
    env: BaseEnv, count: int, exclude: Container[bytes] = ()
) -> list[HeldOutProblem]:
    """The first `count` different problems of `env` whose fingerprints are not in `exclude`. They
    are the same in every process. There are fewer if the env has no more.
    """
    problems: dict[bytes, HeldOutProblem] = {}
    for number in range(count * TRIED_PER_PROBLEM):
        if len(problems) == count:
            break
        try:
            problem = make_problem(env, number)
        except ProblemError:
            continue
        fingerprint = problem_fingerprint(problem)
        if fingerprint not in exclude:
            problems.setdefault(fingerprint, HeldOutProblem(number, problem))
    return list(problems.values())


def make_eval_env(run: RunFile, name: str) -> BaseEnv:
    """The env of evaluation `name`. Raises ConfigError."""
    own = run.eval.envs[name]
    source = own.env or name
    env = run.envs[source]
    return make_env(env.kind or source, own.seed, {**env.params, **own.params}, f"eval.envs.{name}")


def select_held_out(
    run: RunFile, name: str, env: BaseEnv, exclude: Container[bytes] = ()
) -> list[HeldOutProblem]:
    """The problems of evaluation `name`. Raises ConfigError if the env has too few."""
    wanted = run.eval.envs[name].problems
    problems = first_distinct(env, wanted, exclude)
    if len(problems) < wanted:
        left = " that training has not posed" if exclude else ""
        raise ConfigError(
            f"eval.envs.{name}.problems is {wanted}, but the env has {len(problems)} different "
            f"ones{left}; lower it"
        )
    return problems


def held_out_fingerprints(run: RunFile, env: str) -> frozenset[bytes]:
    """The fingerprints of all problems that the training of `env` must not pose. Raises
    ConfigError.
    """
    fingerprints: set[bytes] = set()
    for name, own in run.eval.envs.items():
        if (own.env or name) == env:
            for held in select_held_out(run, name, make_eval_env(run, name)):
                fingerprints.add(problem_fingerprint(held.problem))
    return frozenset(fingerprints)
