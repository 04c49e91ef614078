"""Conversations from a file, for the policy to imitate: nothing in them is sampled. All of them are
posed once an epoch, in another order each time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.envs.api import AgentLoopEnv, Message, PolicyClient, Problem, RewardResult
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.sessions.messages import canonical
from streamrl.envs.shipped.cells import chat_message
from streamrl.envs.shipped.row_files import columns_of, read_rows

ROLES = ("system", "developer", "user", "assistant", "tool")


class DemonstrationRow(NamedTuple):
    """One line of the file."""

    line: int  # from 1; the row of a Parquet file
    messages: list[Message]
    tools: list[dict[str, Any]]

    @property
    def answers(self) -> list[int]:
        """The indexes of the messages that the policy is to imitate."""
        roles = [message["role"] for message in self.messages]
        return [index for index, role in enumerate(roles) if role == "assistant"]


class Demonstrations(AgentLoopEnv):
    """`file` is relative to where the env is started: JSON Lines or Parquet, of which each line has
    `messages` and may have `tools`, both as OpenAI's chat completions have them. Every message of
    the assistant is imitated.

    `envs.<name>.loss` has to imitate (`cross_entropy`, or `teacher_kl`). The reward `likelihood` is
    for people: the probability that the policy gives a token of the answers, in the geometric mean.
    """

    def __init__(self, seed: int, file: str) -> None:
        self._conversations = read(Path(file))
        self._order = EpochOrder(seed, len(self._conversations))

    def dataset_index(self, number: int) -> DatasetIndex:
        return self._order(number)

    def problem(self, number: int) -> Problem:
        posed = self.dataset_index(number)
        shown = self._conversations[posed.problem]
        return Problem(
            messages=shown.messages[: shown.answers[0]],
            answer=shown,
            metadata={"line": shown.line, "epoch": posed.epoch},
            tools=shown.tools,
        )

    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        shown: DemonstrationRow = problem.answer
        logprobs: list[float] = []
        for index in shown.answers:
            answer = await ask(shown.messages[:index], shown.tools, shown.messages[index])
            logprobs += answer.logprobs.tolist()
            notes["likelihood"] = math.exp(sum(logprobs) / len(logprobs))

    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> Sequence[RewardResult | Exception]:
        return [{"likelihood": each["likelihood"]} for each in notes]


def read(path: Path) -> list[DemonstrationRow]:
    """All conversations of a file, in order. Raises ValueError, which names the file or the lines
    that cannot be used.
    """
    return read_rows(path, "conversations", conversation)


def conversation(line: int, row: Any) -> DemonstrationRow:
    """The conversation of a row. Raises ValueError if it is none, or if no server and no record
    could have it; the text goes after file and line.
    """
    row = columns_of(row)
    if not isinstance(row.get("messages"), list):
        raise ValueError("no list of 'messages'")
    tools = row.get("tools") or []
    if not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("'tools' is no list of tools")
    messages = [_message(index, message) for index, message in enumerate(row["messages"])]
    conversation = DemonstrationRow(line, messages, tools)
    try:
        msgspec.json.encode(tools)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it cannot be sent to a server ({error})") from None
    if not conversation.answers:
        raise ValueError("no message of the assistant, so there is nothing to imitate")
    if conversation.answers[0] == 0:
        raise ValueError("it begins with the assistant; add a message of a user or a system")
    return conversation


def _message(index: int, message: Any) -> Message:
    """A message of the file as a chat completion has it. Raises ValueError for what is none."""
    fields = chat_message(message, "messages")
    if "function_call" in fields:
        raise ValueError("a function_call, the form before tool_calls; write it as tool_calls")
    calls = fields.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"'tool_calls' is no list of calls: {str(calls)[:60]}")
    if calls:
        fields["tool_calls"] = [
            _call(f"call-{index}-{number}", call) for number, call in enumerate(calls)
        ]
    canonical(fields)  # As a record has it. What the policy imitates keeps its spelling.
    return fields


def _call(identity: str, call: Any) -> dict[str, Any]:
    """A call of a tool. `identity`: its id, if the file gives it none. Raises ValueError."""
    function = _function(call)
    fields = {name: value for name, value in call.items() if value is not None}
    return {"id": identity, "type": "function", **fields, "function": function}


def _function(call: Any) -> dict[str, Any]:
    """What a call of a tool calls, with the arguments as JSON. Raises ValueError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise ValueError(f"a tool call without a function's name: {str(call)[:60]}")
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except ValueError:  # also NaN, and half of a surrogate pair: no record has them
        is_object = False
    if not is_object:
        raise ValueError(f"the arguments of a tool call are no JSON object: {text[:60]}")
    return {**function, "arguments": text}
