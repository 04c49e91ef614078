"""Problems that are kept for evaluation. Training poses none of them, nor any that says the same
under another number.

Numbers alone would not do: an env may pose one problem under many (there are a hundred pairs of
digits; a file is read again each epoch). So a problem is what it says, and the same for an env and
its evaluation, which may be constructed with another seed or other parameters.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from streamrl.config.run_file import RunFile
from streamrl.envs.api import Env, Leads, Problem, make
from streamrl.envs.engine.transcript import NoProblem, pose, text_of
from streamrl.errors import ConfigError
from streamrl.records import Turn

# numbers for each problem that is wanted; an env that says nothing new for so long has no more
LOOKED_AT = 200


class Held(NamedTuple):
    """A problem that is kept."""

    number: int
    problem: Problem


def mark(text: str) -> bytes:
    """What stands for all that says this."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "replace"))


def mark_of(problem: Problem) -> bytes:
    """By its messages; by its tokens where it is posed in those."""
    return (
        mark_of_tokens(problem.tokens) if len(problem.tokens) else mark(text_of(problem.messages))
    )


def mark_of_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(b"tokens" + np.asarray(tokens, "<u4").tobytes())


def marks_of(asked: Turn) -> list[bytes]:
    """Of the problems that a rollout with this first turn may have been made of."""
    return [mark(asked.message), *([] if asked.tokens is None else [mark_of_tokens(asked.tokens)])]


def held_out(env: Env | Leads, count: int, but: Container[bytes] = ()) -> list[Held]:
    """The first `count` different problems of `env`, those in `but` passed over. The same in any
    process; fewer where it has no more.
    """
    found: dict[bytes, Held] = {}
    for number in range(count * LOOKED_AT):
        if len(found) == count:
            break
        try:
            problem = pose(env, number)
        except NoProblem:
            continue
        if (said := mark_of(problem)) not in but:
            found.setdefault(said, Held(number, problem))
    return list(found.values())


def make_env(run: RunFile, name: str) -> Env | Leads:
    """The env of evaluation `name`. Raises ConfigError."""
    own = run.eval.envs[name]
    source = own.env or name
    env = run.envs[source]
    return make(env.kind or source, own.seed, {**env.params, **own.params}, f"eval.envs.{name}")


def exam(run: RunFile, name: str, env: Env | Leads, but: Container[bytes] = ()) -> list[Held]:
    """The problems of evaluation `name`. Raises ConfigError when there are not as many."""
    wanted = run.eval.envs[name].problems
    problems = held_out(env, wanted, but)
    if len(problems) < wanted:
        left = " that training has not posed" if but else ""
        raise ConfigError(
            f"eval.envs.{name}.problems is {wanted}, but the env has {len(problems)} different ones{left}; lower it"
        )
    return problems


def kept(run: RunFile, env: str) -> frozenset[bytes]:
    """The marks of all problems that are not for the training of `env`. Raises ConfigError."""
    names = [name for name, own in run.eval.envs.items() if (own.env or name) == env]
    return frozenset(
        mark_of(held.problem) for name in names for held in exam(run, name, make_env(run, name))
    )
