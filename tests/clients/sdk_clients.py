"""`python sdk_clients.py CLIENT URL KEY`: one loop of an agent with a tool, with a Python SDK.

It runs in .venv-agents, without streamrl. The policy is to call `add` and then to answer; a second
question follows where the SDK keeps the conversation by itself or the loop is ours.
"""

import asyncio
import json
import sys

QUESTION = "What is 1+2? Use the tool."
AGAIN = "Thank you. Is that right?"
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def with_openai(url, key):
    from openai import OpenAI

    api = OpenAI(base_url=f"{url}/v1", api_key=key)
    function = {"name": "add", "description": "Adds two numbers.", "parameters": ARGUMENTS}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": QUESTION}]
    for question in (AGAIN, None):
        while True:
            answer = api.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                given = {"role": "tool", "tool_call_id": call.id, "content": str(result)}
                messages.append(given)
        if question:
            messages.append({"role": "user", "content": question})


def with_anthropic(url, key):
    from anthropic import Anthropic

    api = Anthropic(base_url=url, api_key=key)
    tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": ARGUMENTS}]
    messages = [{"role": "user", "content": QUESTION}]
    for question in (AGAIN, None):
        while True:
            answer = api.messages.create(
                model="policy", max_tokens=500, messages=messages, tools=tools
            )
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})
        if question:
            messages.append({"role": "user", "content": question})


def with_openai_agents(url, key):
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel("policy", AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
    tool = agents.function_tool(add)
    agent = agents.Agent("adder", instructions="Add.", model=model, tools=[tool])
    first = asyncio.run(agents.Runner.run(agent, QUESTION))
    more = [*first.to_input_list(), {"role": "user", "content": AGAIN}]
    model._client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    asyncio.run(agents.Runner.run(agent, more))


def with_litellm(url, key):
    import litellm

    litellm.telemetry = False
    function = {"name": "add", "description": "Adds two numbers.", "parameters": ARGUMENTS}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": QUESTION}]
    for question in (AGAIN, None):
        while True:
            answer = litellm.completion(
                "openai/policy",
                messages=messages,
                tools=tools,
                api_base=f"{url}/v1",
                api_key=key,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                given = {"role": "tool", "tool_call_id": call.id, "content": str(result)}
                messages.append(given)
        if question:
            messages.append({"role": "user", "content": question})


def with_langchain(url, key):
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    models = [
        ChatOpenAI(model="policy", base_url=f"{url}/v1", api_key=key),
        ChatAnthropic(model="policy", base_url=url, api_key=key, max_tokens=500),
    ]
    for number, model in enumerate(models):
        bound = model.bind_tools([add])
        messages = [HumanMessage(f"{QUESTION} ({number})")]
        for question in (AGAIN, None):
            while True:
                answer = bound.invoke(messages)
                messages.append(answer)
                if not answer.tool_calls:
                    break
                for call in answer.tool_calls:
                    result = str(add(**call["args"]))
                    messages.append(ToolMessage(result, tool_call_id=call["id"]))
            if question:
                messages.append(HumanMessage(question))


def with_pydantic_ai(url, key):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    ours = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    models = [
        OpenAIChatModel("policy", provider=ours),
        OpenAIResponsesModel("policy", provider=ours),
        AnthropicModel("policy", provider=AnthropicProvider(base_url=url, api_key=key)),
    ]

    async def ask():
        for number, model in enumerate(models):
            agent = Agent(model, tools=[add])
            first = await agent.run(f"{QUESTION} ({number})")
            await agent.run(AGAIN, message_history=first.all_messages())

    asyncio.run(ask())


if __name__ == "__main__":
    client, url, key = sys.argv[1:]
    globals()[f"with_{client}"](url, key)
