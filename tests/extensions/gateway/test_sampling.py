"""Where answers stand in the tree, and what the agent is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from streamrl.config.run_file import Env
from streamrl.envs.sessions.rollouts import to_turns
from streamrl.extensions.gateway.requests import ChatRequest, parsed_request
from streamrl.extensions.gateway.sampling import (
    CallSampler,
    VisibleAnswer,
    continuation_of,
    visible_answer,
)
from streamrl.extensions.gateway.session_index import LiveSession
from streamrl.inference.clients.client import SampledCompletion
from streamrl.inference.clients.prefix import Prefix
from streamrl.stream.log.codec import encode
from streamrl.stream.records import SessionStart, VersionSpan
from streamrl.system.offloading import Offloader
from tests.extensions.gateway.test_openai_chat import ASKED, client
from tests.support.gateways import ENV, gateways, run_of
from tests.support.sampling_stub import END, ROLES, rendered, tool_call

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"sum": {}, "other": {}}}},
}
REQUEST = ChatRequest(tools=[ADD])
GENERATE = "/inference/v1/generate"


def test_calls_of_tools_are_read_from_the_text():
    text = f"one{tool_call('add', b=1, a='x')}two{tool_call('sub')} "
    calls, content = visible_answer(text, REQUEST, "json", "c")
    assert content == "onetwo"
    assert [made["id"] for made in calls] == ["call_c_0", "call_c_1"]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": "x", "b": 1}'}
    one = ChatRequest(tools=[ADD], parallel_tool_calls=False)
    assert visible_answer(text, one, "json", "c").tool_calls == calls[:1]


@pytest.mark.parametrize(
    "text", ["", "plain", "<tool_call>{</tool_call>", tool_call("add") + "<tool_call>5</tool_call>"]
)
def test_what_is_no_call_is_text(text: str):
    assert visible_answer(text, REQUEST, "json", "c") == VisibleAnswer([], None)


def test_in_brackets_the_first_tool_is_called_with_its_first_argument():
    (made,), content = visible_answer("[1+2]", REQUEST, "brackets", "c")
    assert made["function"] == {"name": "add", "arguments": '{"sum": "1+2"}'} and content == ""
    assert visible_answer("1+2", REQUEST, "brackets", "c") == VisibleAnswer([], None)


def test_a_conversation_that_is_changed_forks_and_says_why(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())

        def ask(*said: tuple[str, str]) -> str:
            messages: Any = [{"role": role, "content": text} for role, text in said]
            answer = api.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message.content or ""

        system = ("system", "s")
        first = ask(system, ("user", "q"))
        second = ask(system, ("user", "q"), ("assistant", first), ("user", "more"))
        ask(system, ("user", "summary"))
        ask(("system", "helper"), ("user", "q"))
        ask(
            system,
            ("user", "Q"),
            ("assistant", first),
            ("user", "more"),
            ("assistant", second),
            ("user", "."),
        )
        calls = gateway.calls()
    assert [call.fork for call in calls] == ["", "", "compaction", "sub-agent", "edit"]
    whole = calls[4].prompt.tolist()
    assert whole.count(ROLES["user"]) == 3 and not calls[4].continues


def test_an_answer_whose_spaces_the_template_drops_is_still_gone_on_from(tmp_path: Path):
    """The agent sends back another text, of which the server makes the same tokens."""
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        plain = gateway.stub.answer

        def trimming(path: str, body: Any) -> Any:
            if path.endswith("/render"):
                messages = [{**m, "content": m["content"].strip()} for m in body["messages"]]
                body = {**body, "messages": messages}
            return plain(path, body)

        gateway.stub.answer = trimming  # pyright: ignore[reportAttributeAccessIssue]
        conversation: Any = list(ASKED)
        for turn in range(3):
            answer = api.chat.completions.create(model="policy", messages=conversation)
            said = f" {answer.choices[0].message.content}\n"
            conversation.append({"role": "assistant", "content": said})
            conversation.append({"role": "user", "content": f"turn {turn}"})
        calls = gateway.calls()
    assert [call.continues for call in calls] == ["", calls[0].call, calls[1].call]
    assert not any(call.fork for call in calls)
    assert bytes(calls[2].prompt[calls[2].prompt < END].tolist()) == b"turn 1"


@pytest.mark.parametrize("history", ["template", "keep"])
def test_a_template_that_rewrites_history_is_a_fork_unless_history_is_kept(
    history: str, tmp_path: Path
):
    """As templates do that drop earlier thoughts."""
    with gateways(tmp_path, model={"history": history}) as gateway:
        api = client(gateway, gateway.start())
        plain = gateway.stub.answer

        def forgetting(path: str, body: Any) -> Any:
            if path.endswith("/render"):
                messages = [
                    {**m, "content": m["content"][-1:]} if m["role"] == "assistant" else m
                    for m in body["messages"]
                ]
                body = {**body, "messages": messages}
            return plain(path, body)

        gateway.stub.answer = forgetting  # pyright: ignore[reportAttributeAccessIssue]
        conversation: Any = list(ASKED)
        for _ in range(2):
            answer = api.chat.completions.create(model="policy", messages=conversation)
            said = answer.choices[0].message.content
            conversation += [{"role": "assistant", "content": said}, *ASKED]
        one, two = gateway.calls()
    sent = [body["token_ids"] for path, body in gateway.stub.asked if path == GENERATE]
    assert two.continues == one.call
    if history == "keep":
        assert not two.fork and two.prompt.tolist() == rendered(ASKED, [])
        assert sent[1] == [*sent[0], *one.tokens.tolist(), *two.prompt.tolist()]
    else:
        assert two.fork == "template" and sent[1][two.kept :] == two.prompt.tolist()
        assert sent[1][: two.kept] == sent[0][: two.kept] and two.kept
        assert sent[1].count(ROLES["user"]) == 2
    turns = to_turns([one, two])
    assert [turn.fork for turn in turns] == [False, False, history == "template", False]
    learned = [turn.tokens.tolist() for turn in turns if turn.logprobs is not None]
    assert learned == [one.tokens.tolist(), two.tokens.tolist()]


class Policy:
    """A client whose servers say the same to everything, and keep the tokens before it."""

    async def sample(
        self,
        messages: list[Any],
        n: int,
        env: Env,
        tools: Any,
        prefix: Prefix,
    ) -> list[SampledCompletion]:
        text = "an answer"
        return [
            SampledCompletion(
                server_id="i",
                prompt_tokens=np.array([*prefix.tokens, *rendered(messages[-1:], [])], np.uint16),
                tokens=np.array([*text.encode(), END], np.uint16),
                logprobs=np.zeros(len(text) + 1, np.float32),
                text=text,
                finish_reason="stop",
                version_spans=[VersionSpan(version=0, start=0, end=len(text) + 1)],
                latency_s=0.5,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_tokens=200,
                prefix_tokens=len(prefix.tokens),
            )
        ]


async def test_the_200th_call_of_a_session_takes_no_more_of_the_log_than_the_first(tmp_path: Path):
    """The agent sends the whole conversation each time, and a record has only what is new in it."""
    run = run_of(tmp_path)
    sampler = CallSampler(run, {run.envs[ENV].pool: Policy()}, Offloader())  # pyright: ignore[reportArgumentType]
    session = LiveSession(ENV, SessionStart(session="s", environment=ENV, problem_id="7"))
    conversation: list[dict[str, Any]] = []
    sizes = list[int]()
    for turn in range(200):
        conversation.append({"role": "user", "content": f"question {turn:3}"})
        request = ChatRequest(messages=list(conversation))
        continuation = continuation_of(session.tree, parsed_request(request))
        (call,) = await sampler.sample(session, request, continuation, f"{request.digest()}#0")
        sizes.append(len(encode(call)))
        session.add(call)
        conversation.append({"role": "assistant", "content": call.text})
    assert sum(sizes[100:]) <= 1.05 * sum(sizes[:100])
    assert not any(call.fork for call in session.tree.calls.values())


def test_what_a_server_refuses_is_the_agents_error(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        plain = gateway.stub.answer

        def refusing(path: str, body: Any) -> Any:
            if path.endswith("/render"):
                return 400, {"error": {"message": "roles must alternate", "code": 400}}
            return plain(path, body)

        gateway.stub.answer = refusing  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            api.chat.completions.create(model="policy", messages=ASKED)
