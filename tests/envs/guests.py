"""Environments as users of verifiers write them: nothing here knows of streamrl. `params: {which:
...}` picks one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(which: str = "single", rows: int = 3, **settings: Any) -> vf.Environment:
    made = {
        "single": single,
        "turns": turns,
        "tool": tool,
        "together": together,
        "stuck": stuck,
        "nothing": nothing,
        "raises": raises,
    }
    return made[which](rows, **settings)


def questions(rows: int) -> Dataset:
    return Dataset.from_list([{"question": f"q{i}", "answer": str(i)} for i in range(rows)])


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def brief(completion: Any) -> float:
    return 1 / (1 + len(completion[-1]["content"]))


def single(rows: int, **settings: Any) -> vf.Environment:
    """Its parts 0.8 and 0.2; `brief` of one character is a half."""
    return vf.SingleTurnEnv(
        dataset=questions(rows),
        system_prompt="be brief",
        rubric=vf.Rubric([right, brief], [0.8, 0.2]),
        **settings,
    )


class Countdown(vf.MultiTurnEnv):
    """Answers `left N` until N is 0; counts for itself what it was told."""

    async def setup_state(self, state: vf.State) -> None:
        state["left"] = 2
        state["heard"] = []

    @vf.stop
    async def over(self, state: vf.State) -> bool:
        return len(state["heard"]) > 0 and state["left"] == 0

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        state["heard"].append(messages[-1].content)
        state["left"] -= 1
        if state["left"] == 0:
            state["final_env_response"] = [vf.types.UserMessage(content="that was all")]
            return state["final_env_response"]
        return [vf.types.UserMessage(content=f"left {state['left']}")]


def turns(rows: int, **settings: Any) -> vf.Environment:
    def heard(state: vf.State) -> float:
        return float(len(state["heard"]))

    def logprob(state: vf.State) -> float:
        """What the library's own record of the tokens says."""
        return sum(sum(step["tokens"]["completion_logprobs"]) for step in state["trajectory"])

    return Countdown(
        dataset=questions(rows), rubric=vf.Rubric([heard, logprob], [1.0, 0.0]), **settings
    )


def tool(rows: int, **settings: Any) -> vf.Environment:
    def double(number: str) -> str:
        """Twice the number.

        Args:
            number: a whole number
        """
        return str(2 * int(number))

    return vf.ToolEnv(
        tools=[double], dataset=questions(rows), rubric=vf.Rubric([right]), max_turns=4, **settings
    )


def together(rows: int, **settings: Any) -> vf.Environment:
    def rank(completions: list[Any]) -> list[float]:
        said = [completion[-1]["content"] for completion in completions]
        return [float(sorted(said).index(text)) for text in said]

    return vf.SingleTurnEnv(dataset=questions(rows), rubric=vf.Rubric([rank]), **settings)


class Stuck(vf.MultiTurnEnv):
    """Replies after an hour, or fails to."""

    how: str = "late"

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        if self.how == "late":
            await asyncio.sleep(3600)
        if self.how == "error":
            raise vf.errors.ToolCallError("the tool is gone")
        raise RuntimeError("not an error of the library")


def stuck(rows: int, how: str = "late", **settings: Any) -> vf.Environment:
    return Stuck(dataset=questions(rows), rubric=vf.Rubric([lambda: 1.0]), how=how, **settings)


def nothing(rows: int) -> Any:
    return {"no": rows}


def raises(rows: int, together: bool = False) -> vf.Environment:
    """Its function knows nothing of answers that are not numbers."""

    def number(completion: Any, **_: Any) -> float:
        return float(completion[-1]["content"])

    def longest(completions: list[Any]) -> list[float]:
        return [float(completion[-1]["content"]) for completion in completions]

    return vf.SingleTurnEnv(
        dataset=questions(rows), rubric=vf.Rubric([longest if together else number])
    )
