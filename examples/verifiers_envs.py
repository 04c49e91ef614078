"""Three environments of the library verifiers, one of each sort, for a model whose vocabulary is a
few characters. Nothing here knows of streamrl.

A run file names them as `kind: verifiers:examples/verifiers_envs.py` with `params: {sort:
single-turn}`, or multi-turn, or tool.
"""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(sort: str = "single-turn") -> vf.Environment:
    """What verifiers calls, with the `params` of the run file."""
    sorts = {"single-turn": copy, "multi-turn": guess, "tool": look_up}
    return sorts[sort]()


def copy() -> vf.Environment:
    """`7=` is to be answered `7`."""

    def first(completion: Any, answer: str) -> float:
        return float(completion[0].content[:1] == answer)

    def exact(completion: Any, answer: str) -> float:
        return float(completion[0].content == answer)

    rows = [{"question": f"{n}=", "answer": str(n)} for n in range(10)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric([first, exact], [0.5, 0.5])
    )


class Guess(vf.MultiTurnEnv):
    """A number from 0 to 4 is to be guessed. After each guess the policy is told `<` or `>`."""

    @vf.stop
    async def found(self, state: vf.State) -> bool:
        if not state["trajectory"]:
            return False
        return state["trajectory"][-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        said = messages[-1].content
        hint = "?"
        if said.isdigit():
            hint = "<" if int(state["answer"]) < int(said) else ">"
        return [vf.types.UserMessage(content=hint)]


def guess() -> vf.Environment:
    """`0-4` is to be answered with a guess, three times at most."""

    def found(completion: Any, answer: str) -> float:
        return float(completion[-1].content == answer)

    def numbers(completion: Any) -> float:
        """The share of the guesses that are numbers in question."""
        said = [message.content for message in completion if message.role == "assistant"]
        return sum(text in {"0", "1", "2", "3", "4"} for text in said) / len(said)

    rows = [{"question": "0-4", "answer": str(n)} for n in range(5)]
    return Guess(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric([found, numbers], [0.7, 0.3]), max_turns=3
    )


def look_up() -> vf.Environment:
    """`3=` is to be answered with what the tool says of 3, which nobody can know without it."""
    table = random.Random(0).sample(range(10), 10)

    def secret(digit: str) -> str:
        """What the digit stands for.

        Args:
            digit: 0 to 9
        """
        return str(table[int(digit)])

    def called(completion: Any, info: dict[str, str]) -> float:
        """1 if the first thing said is the right call. A call of something else counts 0.75, and
        what is no call counts by its characters that stand in the right position.
        """
        first = completion[0]
        if first.tool_calls:
            return 1.0 if info["digit"] in first.tool_calls[0].arguments else 0.75
        wanted = f"[{info['digit']}]"
        right = sum(a == b for a, b in zip(first.content, wanted, strict=False))
        return 0.75 * right / len(wanted)

    def answered(completion: Any, answer: str) -> float:
        last = completion[-1]
        has_called = len(completion) > 1
        return float(has_called and last.role == "assistant" and last.content == answer)

    rows = []
    for n in range(10):
        rows.append({"question": f"{n}=", "answer": str(table[n]), "info": {"digit": str(n)}})
    return vf.ToolEnv(
        tools=[secret],
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric([called, answered], [0.5, 0.5]),
        max_turns=3,
    )
