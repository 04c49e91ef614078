"""An agent that uses the anthropic SDK. Only base_url and api_key are there for the gateway."""

from anthropic import Anthropic, DefaultHttpxClient

HTTP = DefaultHttpxClient()  # its connections are shared by all sessions
TOOL = {
    "name": "calculator",
    "description": "What an expression of whole numbers comes to",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def solve(gateway, key, question, calculator):
    """Answer a question. Returns the text of each turn of the policy."""
    client = Anthropic(
        base_url=gateway,
        api_key=key,
        http_client=HTTP,
        max_retries=8,
    )
    messages = [{"role": "user", "content": question}]
    texts = []
    while len(texts) < 3:
        reply = client.messages.create(
            model="policy", max_tokens=6, messages=messages, tools=[TOOL]
        )
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return [*texts, "".join(block.text for block in reply.content)]
        expression = uses[0].input["expression"]
        texts.append(f"[{expression}]")
        result = {
            "type": "tool_result",
            "tool_use_id": uses[0].id,
            "content": calculator(expression),
        }
        messages.append({"role": "user", "content": [result]})
    return texts
