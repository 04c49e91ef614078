"""An agent that uses the openai SDK. Two lines are there for the gateway: base_url and api_key."""

import json

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()  # its connections are shared by all sessions
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "What an expression of whole numbers comes to",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def solve(gateway, key, question, calculator):
    """Answer a question. Returns the text of each turn of the policy."""
    client = OpenAI(
        base_url=f"{gateway}/v1",
        api_key=key,
        http_client=HTTP,
        max_retries=8,
    )
    messages = [{"role": "user", "content": question}]
    texts = []
    while len(texts) < 3:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return [*texts, message.content or ""]
        call = message.tool_calls[0]
        expression = json.loads(call.function.arguments)["expression"]
        texts.append(f"[{expression}]")
        result = {"role": "tool", "tool_call_id": call.id, "content": calculator(expression)}
        messages.append(result)
    return texts
