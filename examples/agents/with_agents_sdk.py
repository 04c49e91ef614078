"""An agent of the framework openai-agents. Two lines are there for the gateway: base_url and
api_key.
"""

import asyncio
import json

from agents import (
    Agent,
    MessageOutputItem,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    ToolCallItem,
    function_tool,
)
from agents.exceptions import AgentsException
from openai import AsyncOpenAI


def solve(gateway, key, question, calculator):
    """Answer a question. Returns what the policy said, turn by turn."""
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
        items = done.new_items
    except AgentsException as error:  # it called the tool three times
        items = error.run_data.new_items
    return [said for item in items if (said := said_in(item)) is not None]


def said_in(item):
    """What the policy said in this item of a run; None for a result of the tool."""
    if isinstance(item, ToolCallItem):
        return f"[{json.loads(item.raw_item.arguments)['expression']}]"
    if isinstance(item, MessageOutputItem):
        return "".join(part.text for part in item.raw_item.content)
    return None
