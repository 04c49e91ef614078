"""Conversations of others in the stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.sections.envs import Env
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.inference.clients.client import Client
from streamrl.stream.records import Rollout
from streamrl.stream.records.compact import wide_ids, wide_logprobs
from streamrl.system.errors import ConfigError
from tests.support.sampling_stub import SamplingStub

ASKED = {"role": "user", "content": "3*4="}
CALLS = {"role": "assistant", "content": "[3*4]"}
HEARS = {"role": "tool", "content": "12"}
SAYS = {"role": "assistant", "content": "12"}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
BAD = {"name": "calculator", "arguments": "{bad"}


def call(argument: str) -> dict[str, str]:
    return {"name": "calculator", "arguments": f'{{"a": {argument}}}'}


SHOWN = [
    {"messages": [ASKED, CALLS, HEARS, SAYS], "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "Be brief."}, ASKED, SAYS]},
]


def written(directory: Path, rows: list[Any]) -> str:
    path = directory / "shown.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def imitated(file: str, count: int, **settings: Any) -> list[Rollout]:
    """The first rollouts of an env of this file, where a server has the policy."""
    env: Any = make_env("demonstrations", 1, {"file": file}, "envs.x")

    async def play(stub: SamplingStub) -> list[Rollout]:
        client = Client()
        client.on_server(stub.name, stub.record())
        runner = RolloutRunner(env, Env(**settings), client)
        made: list[Rollout] = []
        for number in range(count):
            task = Task("x", number, "x-0", env.problem(number))
            made += await runner.run_group(task, 1)
        await client.close()
        return made

    with SamplingStub() as stub:
        rollouts = asyncio.run(play(stub))
        asked = [body["sampling_params"] for path, body in stub.asked if "generate" in path]
        assert asked and all("prompt_logprobs" in each for each in asked)  # nothing is sampled
        return rollouts


def test_every_answer_of_a_conversation_is_said_in_its_place(tmp_path: Path):
    rollouts = imitated(written(tmp_path, SHOWN), 4)
    assert sorted(rollout.metadata["line"] for rollout in rollouts) == [1, 1, 2, 2]
    by_line = {rollout.metadata["line"]: rollout for rollout in rollouts}
    said = [(turn.role, turn.message) for turn in by_line[1].turns]
    assert said[-3:] == [("assistant", "[3*4]"), ("tool", "12"), ("assistant", "12")]
    assert [turn.role for turn in by_line[2].turns][-1] == "assistant"
    for rollout in rollouts:
        assert not rollout.failure and "truncation" not in rollout.metadata
        said = [turn for turn in rollout.turns if turn.role == "assistant"]
        tokens = np.concatenate([turn.tokens for turn in said])
        logprobs = wide_logprobs(np.concatenate([turn.logprobs for turn in said]))
        assert (logprobs == -wide_ids(tokens).astype(np.float32) / 512).all()
        assert rollout.rewards == {"likelihood": pytest.approx(np.exp(logprobs.mean()))}


def test_a_call_of_a_tool_in_openais_form_goes_on_token_for_token(tmp_path: Path):
    """Also where the file gives the call no id, and its arguments as they are."""
    function = {"name": "calculator", "arguments": {"e": "3*4"}}
    calls = {"role": "assistant", "tool_calls": [{"function": function}]}
    row = {"messages": [ASKED, calls, HEARS, SAYS], "tools": [TOOL]}
    (rollout,) = imitated(written(tmp_path, [row]), 1)
    assert [(turn.role, turn.message) for turn in rollout.turns if turn.role != "user"] == [
        ("assistant", '<tool_call>{"name": "calculator", "arguments": {"e": "3*4"}}</tool_call>'),
        ("tool", "12"),
        ("assistant", "12"),
    ]
    assert not any(turn.fork for turn in rollout.turns)


def test_more_turns_than_the_run_allows_cut_a_conversation_off(tmp_path: Path):
    (rollout,) = imitated(written(tmp_path, SHOWN[:1]), 1, max_turns=1)
    assert rollout.metadata["truncation"] == "turns"
    assert [turn.message for turn in rollout.turns if turn.role == "assistant"] == ["[3*4]"]


def test_a_parquet_file_is_read_as_well(tmp_path: Path):
    path = tmp_path / "shown.parquet"
    called = {"name": "calculator", "arguments": {"a": "3"}}
    other = {"name": "search", "arguments": {"b": "4"}}
    calls = [{"id": "1", "function": called}, {"id": "2", "function": other}]
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, SAYS]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), path)
    env: Any = make_env("demonstrations", 1, {"file": str(path)}, "envs.x")
    asked, answer, says = env.problem(0).answer.messages
    assert (asked, says, answer["content"]) == (ASKED, SAYS, "")
    arguments = [call["function"]["arguments"] for call in answer["tool_calls"]]
    assert arguments == ['{"a": "3"}', '{"b": "4"}']


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no conversations"),
        ([{"prompt": "1"}], r"shown\.jsonl:1: no list of 'messages'"),
        ([SHOWN[0], {"messages": [ASKED]}], r"jsonl:2: no message of the assistant"),
        (
            [{"messages": ["3*4="]}],
            r"jsonl:1: 'messages' has a message without role and content: '3\*4='",
        ),
        ([{"messages": [SAYS]}], "jsonl:1: it begins with the assistant"),
        (
            [{"messages": [{**ASKED, "content": "\ud800"}, SAYS]}],
            "jsonl:1: 'messages' has half of a surrogate pair",
        ),
        ([{"messages": [ASKED, {**SAYS, "tool_calls": [{}]}]}], "without a function's name"),
        (
            [{"messages": [ASKED, {**SAYS, "tool_calls": [{"function": BAD}]}]}],
            "the arguments of a tool call are no JSON object: {bad",
        ),
        ([{**SHOWN[0], "tools": ["calculator"]}], r"jsonl:1: 'tools' is no list of tools"),
        *[
            ([SHOWN[0], {"messages": [ASKED, {**SAYS, "tool_calls": calls}]}], f"jsonl:2: {says}")
            for calls, says in (
                ("calculator", "'tool_calls' is no list of calls: calculator"),
                (3, "'tool_calls' is no list of calls: 3"),
                ({"function": {}}, "'tool_calls' is no list of calls: {'function'"),
                ([None], "a tool call without a function's name: None"),
                ([{"function": call("NaN")}], "the arguments of a tool call are no JSON object"),
                ([{"function": call('"\\ud800"')}], "the arguments of a tool call are no JSON"),
                ([{"id": 7, "function": call("1")}], "a tool call has an id and a function"),
            )
        ],
        (
            [{"messages": [ASKED, {**SAYS, "content": [{"type": "image"}]}]}],
            "a part that is no text",
        ),
        (
            [{"messages": [{**ASKED, "content": 12}, SAYS]}],
            "a message whose content is no text: 12",
        ),
        (
            [{"messages": [{**ASKED, "role": "human"}, SAYS]}],
            "jsonl:1: .*'human' is no role; there",
        ),
        (
            [{"messages": [ASKED, {**SAYS, "function_call": call("1")}]}],
            "a function_call, the form before tool_calls",
        ),
    ],
)
def test_a_file_without_conversations_is_named(tmp_path: Path, rows: list[Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make_env("demonstrations", 1, {"file": written(tmp_path, rows)}, "envs.x")


@pytest.mark.parametrize("where", ["messages", "tools"])
def test_what_is_nested_too_deeply_is_named(tmp_path: Path, where: str):
    path = tmp_path / "shown.jsonl"
    deep = "[" * 100_000 + "]" * 100_000
    good = json.dumps(SHOWN[1])
    path.write_text(f"{good}\n" + good[:-1] + f', "{where}": {deep}}}\n')
    with pytest.raises(ConfigError, match=r"jsonl:2: not JSON \(nested too deeply\)"):
        make_env("demonstrations", 1, {"file": str(path)}, "envs.x")


def test_a_null_that_a_tool_is_called_with_or_that_its_schema_allows_is_kept(tmp_path: Path):
    """In JSON Lines it was written, and in Parquet it may stand for what other rows have."""
    calls = {**CALLS, "name": None, "tool_calls": [{"function": {**call("null"), "x": None}}]}
    schema = {"enum": ["a", None]}
    tool = {"type": "function", "function": {"name": "calculator", "parameters": schema}}
    row = {"messages": [ASKED, calls, HEARS, SAYS], "tools": [tool]}
    env: Any = make_env("demonstrations", 1, {"file": written(tmp_path, [row])}, "envs.x")
    shown = env.problem(0).answer
    (called,) = shown.messages[1]["tool_calls"]
    assert called["function"]["arguments"] == '{"a": null}' and "name" not in shown.messages[1]
    assert shown.tools == [tool]


def test_without_tools_a_row_may_say_null(tmp_path: Path):
    assert len(imitated(written(tmp_path, [{**SHOWN[1], "tools": None}]), 1)) == 1
