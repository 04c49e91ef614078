"""An agent of the framework openai-agents. Two lines are there for the gateway: base_url and
api_key.
"""

import asyncio
import json

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import AgentsException
from openai import AsyncOpenAI


def solve(gateway, key, question, calculator):
    """Answer a question. Returns the text of each turn of the policy."""
    return asyncio.run(connect(gateway, key, question, calculator))


async def connect(gateway, key, question, calculator):
    client = AsyncOpenAI(
        base_url=f"{gateway}/v1",
        api_key=key,
        max_retries=8,
    )
    async with client:  # its connections belong to this event loop
        return await run(client, question, calculator)


async def run(client, question, calculate):
    @function_tool
    def calculator(expression: str) -> str:
        """What an expression of whole numbers comes to."""
        return calculate(expression)

    agent = Agent(
        name="calculator",
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
        tools=[calculator],
    )
    quiet = RunConfig(tracing_disabled=True)
    try:
        done = await Runner.run(agent, question, max_turns=3, run_config=quiet)
        responses = done.raw_responses
    except AgentsException as error:  # it called the tool three times
        responses = error.run_data.raw_responses
    return [said_in(response) for response in responses]


def said_in(response):
    """What the policy answered in one call: a call of the tool, or a text, which may be empty."""
    text = ""
    for item in response.output:
        if item.type == "function_call":
            return f"[{json.loads(item.arguments)['expression']}]"
        if item.type == "message":
            text += "".join(part.text for part in item.content)
    return text
