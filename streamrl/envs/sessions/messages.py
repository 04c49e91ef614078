"""Chat messages in one form, so that a conversation is recognised when an agent sends it again.

Agents send the whole conversation with each call. What they send back of the policy's own answers
differs in small ways by the library that they use: empty fields, text in parts, the order of keys,
the spaces in a tool's arguments. `canonical` removes these differences and `digest` names a
conversation by its content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from streamrl.envs.sessions.thoughts import without_thoughts

Message = dict[str, Any]
"""An OpenAI chat message, with `role` and `content`."""

EMPTY = b""
"""The digest of a conversation without any message."""


def canonical(message: Mapping[str, Any]) -> Message:
    """The message with what counts: role, text, thoughts (`reasoning`), name, calls of tools, and
    which call it answers.

    Raises ValueError for anything that is not a message.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"a message has a role and content, not {_shown(message)}")
    if role == "user" and message.get("content") is None:
        raise ValueError("a message of the user has no content")
    result: Message = {"role": role, "content": text_of(message.get("content"))}
    if role == "assistant" and message.get("reasoning"):
        result["reasoning"] = text_of(message["reasoning"])
    if message.get("name"):
        result["name"] = str(message["name"])
    if message.get("tool_call_id"):
        result["tool_call_id"] = str(message["tool_call_id"])
    calls = message.get("tool_calls")
    if calls and not isinstance(calls, list):
        raise ValueError(f"the tool calls of a message are a list, not {_shown(calls)}")
    if calls:
        result["tool_calls"] = [canonical_call(call) for call in calls]
    return result


def canonical_if_possible(message: Mapping[str, Any]) -> Message:
    """The canonical message; or this one as it is, if it has more than that, such as an image."""
    try:
        return canonical(message)
    except ValueError:
        return dict(message)


def canonical_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool as OpenAI writes it. Raises ValueError for another shape."""
    match call:
        case {"id": str(identity), "function": {"name": str(name), "arguments": str(arguments)}}:
            function = {"name": name, "arguments": _same_json(arguments)}
            return {"id": identity, "type": "function", "function": function}
        case _:
            raise ValueError(
                "a tool call has an id and a function with name and arguments, a string of JSON;"
                f" not {_shown(call)}"
            )


def text_of(content: Any) -> str:
    """The text of a message's content: a string, nothing, or a list of parts that are text.

    Raises ValueError for a part that is not text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"the content of a message is text, not {_shown(content)}")
    texts = list[str]()
    for part in content:
        match part:
            case str():
                texts.append(part)
            case {"text": str(text)}:
                texts.append(text)
            case {"refusal": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(f"the policy reads text only, not {_shown(part)}")
    return "".join(texts)


def joined_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """The text of messages, as in a turn of a rollout."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def digest(before: bytes, messages: Iterable[Mapping[str, Any]]) -> bytes:
    """Names a conversation: 16 bytes that follow from the digest of the conversation `before` and
    from the canonical messages after it.

    Thoughts do not count, because many libraries do not send them back, or write them in another
    way. Neither does the text of a message that calls tools: the ids of the calls, which are
    unique, name the answer.
    """
    for message in messages:
        named = {key: value for key, value in message.items() if key != "reasoning"}
        if message.get("tool_calls"):
            named["content"] = ""
        elif message["role"] == "assistant":
            named["content"] = without_thoughts(message["content"])
        text = msgspec.json.encode(named, order="deterministic")
        before = xxhash.xxh3_128_digest(before + text)
    return before


def digests(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """The digest of a conversation of these canonical messages up to each of them."""
    result = list[bytes]()
    before = EMPTY
    for message in messages:
        before = digest(before, [message])
        result.append(before)
    return result


def _same_json(text: str) -> str:
    """The arguments of a tool in one spelling. Text that is no JSON stays as it is, and so does one
    with half a surrogate pair, which no record can have.
    """
    try:
        same = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
        same.encode()  # raises a ValueError for half a pair
        return same
    except (ValueError, RecursionError):
        return text


def _shown(value: Any) -> str:
    return repr(value)[:100]
