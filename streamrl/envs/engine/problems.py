"""Has an env pose a problem, whatever the env does."""

from __future__ import annotations

from streamrl.envs.api import AgentLoopEnv, BaseEnv, MultiTurnEnv, Problem
from streamrl.system.errors import describe_error


class ProblemError(Exception):
    """The env failed to pose a problem; the message has the cause."""


def make_problem(env: BaseEnv, number: int) -> Problem:
    """Have the env pose problem `number`. Raises ProblemError, whatever the env raises."""
    try:
        problem = env.problem(number)
        if not isinstance(problem, Problem):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"not a Problem but {type(problem).__name__}")
        # the next prompt would have to be rendered from messages with the same text
        if len(problem.tokens) and isinstance(env, MultiTurnEnv | AgentLoopEnv):
            raise ValueError("a prompt of token ids is for one turn, and this env has several")
    except Exception as error:  # an env is another author's code
        raise ProblemError(f"problem {number}: {describe_error(error)}") from error
    return problem
