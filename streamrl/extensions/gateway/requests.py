"""What all APIs of the gateway have in common: a request, its answer, and its refusal.

Sampling parameters of a request do not count: the env's settings do, because the learner has to
reproduce the distribution. `fields.py` has what becomes of each other field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import xxhash

from streamrl.envs.sessions.call_tree import CallTree
from streamrl.envs.sessions.messages import Message, canonical, digests
from streamrl.envs.sessions.tool_calls import function_tool
from streamrl.stream.records import ModelCall
from streamrl.stream.records.fields import check_depth
from streamrl.system.text import one_line

Body = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")  # that chat templates know
MAX_CHOICES = 128
MAX_TOOLS = 256
MAX_NAME = 256  # characters of a name or an id in a message: most chat templates show none
MAX_BODY_DEPTH = 256  # of lists and objects in each other
CUSTOM_ARGUMENT = "input"  # of a tool that takes a text instead of arguments


class RequestRejected(Exception):
    """A request is not answered. It has the HTTP status, the reason, and the field to blame."""

    def __init__(
        self, status: int, why: str, field: str = "", code: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(one_line(why, 1_000))
        self.status = status
        self.field = field
        self.code = code
        self.retry_after_s = retry_after_s


class UnknownCall(RequestRejected):
    """A request refers to a call that the session has not had, as far as is known."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for answers, with what the answers depend on."""

    messages: list[Message] = []  # canonical
    token_ids: list[int] = []  # the prompt, where there are no messages
    tools: list[dict[str, Any]] = []  # as OpenAI chat tools
    reads_tool_calls: bool = True
    parallel_tool_calls: bool = True
    n: int = 1
    max_tokens: int = 0  # 0: as many as the env's settings allow
    # They override those of the env. Unset, they leave the digest as before the field existed.
    chat_template_kwargs: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET

    def digest(self) -> str:
        """Names what is asked for: requests with equal fields have the same digest."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self, order="deterministic"))


class ParsedRequest(NamedTuple):
    """A request with all by which it and its conversation are looked up."""

    chat: ChatRequest
    digest: str
    conversation_digests: list[bytes]  # of the conversation up to each message
    tokens: np.ndarray  # (p,) uint32, of the prompt, where there are no messages


class Answer(NamedTuple):
    """The answers to a request as they are in the log, one for each choice."""

    calls: list[ModelCall]  # by choice
    contexts: list[np.ndarray]  # all tokens up to the end of each answer

    @property
    def prompt(self) -> np.ndarray:
        """All tokens before the first answer."""
        return self.contexts[0][: len(self.contexts[0]) - len(self.calls[0].tokens)]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(call.tokens) for call in self.calls)

    @property
    def size(self) -> int:
        """The bytes of the answers, roughly."""
        return sum(len(call.text) + call.tokens.nbytes for call in self.calls)


class Dialect(NamedTuple):
    """An API that agents speak. Each is a module of pure functions."""

    path: str  # of its calls; `fields.py` has its fields
    parse: Callable[[Body, CallTree], ChatRequest]
    response: Callable[[Body, Answer], dict[str, Any]]
    # The events of a stream, made of the finished response: (name or nothing, data)
    events: Callable[[Body, dict[str, Any]], list[tuple[str, Any]]]
    error: Callable[[RequestRejected], dict[str, Any]]


def parsed_request(chat: ChatRequest) -> ParsedRequest:
    return ParsedRequest(
        chat, chat.digest(), digests(chat.messages), np.array(chat.token_ids, np.uint32)
    )


def rejection(field: str, why: str) -> RequestRejected:
    """The error that blames a field of the body."""
    return RequestRejected(400, f"{field}: {why}", field)


def parse_body(text: bytes | bytearray) -> dict[str, Any]:
    """The object of a request's body. Raises RequestRejected."""
    try:
        body = msgspec.json.decode(text or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRejected(400, f"the body is not JSON that can be read: {error}") from None
    if not isinstance(body, dict):
        raise RequestRejected(400, f"the body is a JSON object, not {type(body).__name__}")
    try:
        check_depth(body, MAX_BODY_DEPTH)
    except ValueError as error:
        raise RequestRejected(400, f"the body is {error}") from None
    return body


def integer(body: Body, field: str, default: int, least: int = 1, most: int = 1 << 31) -> int:
    """A number of the body. Raises RequestRejected."""
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise rejection(field, f"it is a whole number from {least} to {most:,}")
    return value


def string(body: Body, field: str, default: str = "", limit: int = 1_000) -> str:
    """A text of the body. Raises RequestRejected."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > limit:
        raise rejection(field, f"it is a text of at most {limit:,} characters")
    return value


def objects(body: Body, field: str) -> list[dict[str, Any]]:
    """A list of objects of the body; empty if it is not given. Raises RequestRejected."""
    value = body.get(field)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise rejection(field, "it is a list of objects")
    return value


def tool_objects(body: Body) -> list[dict[str, Any]]:
    """The tools of the body, as the API writes them. Raises RequestRejected for too many."""
    tools = objects(body, "tools")
    if len(tools) > MAX_TOOLS:
        raise rejection("tools", f"there are at most {MAX_TOOLS}")
    return tools


def canonical_messages(messages: Sequence[Mapping[str, Any]], field: str) -> list[Message]:
    """The messages of a conversation that the policy is to answer, in the form in which they are
    compared. Raises RequestRejected.
    """
    for message in messages:
        if message.get("role") not in ROLES:
            raise rejection(
                field, f"the role {message.get('role')!r} is none of {', '.join(ROLES)}"
            )
    try:
        result = [bounded(canonical(message)) for message in messages]
    except ValueError as error:
        raise rejection(field, str(error)) from None
    if not result:
        raise rejection(field, "there is no message")
    if result[-1]["role"] == "assistant":
        raise rejection(
            field,
            "the last message is the assistant's, and the policy begins its own answers; end with"
            " one of the user or of a tool",
        )
    return result


def bounded(message: Message) -> Message:
    """The canonical message, if no chat template would leave out most of it. Raises ValueError."""
    calls = message.get("tool_calls", ())
    names = [message.get("name", ""), message.get("tool_call_id", "")]
    names += [name for call in calls for name in (call["id"], call["function"]["name"])]
    if max(map(len, names)) > MAX_NAME:
        raise ValueError(f"names and ids in a message have at most {MAX_NAME} characters")
    return message


def chat_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool of the body as an OpenAI chat tool. Raises RequestRejected."""
    if not isinstance(name, str) or not name:
        raise rejection("tools", "each tool has a name")
    if not isinstance(description, str):
        description = None
    if parameters is not None and not is_schema(parameters):
        raise rejection("tools", f"the parameters of {name!r} are a JSON schema")
    return function_tool(name, description, parameters or {"type": "object", "properties": {}})


def custom_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that takes a text as an OpenAI chat tool with one argument. The grammar of the text,
    if it has one, is part of the description. Raises RequestRejected.
    """
    description = tool.get("description")
    grammar = tool.get("format")
    if isinstance(grammar, dict):
        grammar = cast(dict[str, Any], grammar)
        written = grammar.get("grammar") if isinstance(grammar.get("grammar"), dict) else grammar
        definition = cast(dict[str, Any], written).get("definition")
        if isinstance(definition, str):
            described = f"{description}\n" if isinstance(description, str) else ""
            description = f"{described}The text has this grammar:\n{definition}"
    text = {"type": "string", "description": "the text that the tool takes"}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: text},
        "required": [CUSTOM_ARGUMENT],
    }
    return chat_tool(tool.get("name"), description, parameters)


def text_of_custom_call(tool_call: Mapping[str, Any]) -> str:
    """The text that a recorded call gives to a tool that takes a text."""
    arguments = arguments_of(tool_call)
    match arguments:
        case {"input": str(text)} if len(arguments) == 1:
            return text
        case _:
            return tool_call["function"]["arguments"]


def custom_call(identity: Any, name: Any, text: Any) -> dict[str, Any]:
    """The call of a tool that takes a text, as an OpenAI chat tool call."""
    arguments = json.dumps({CUSTOM_ARGUMENT: text})
    return {"id": identity, "function": {"name": name, "arguments": arguments}}


def is_schema(parameters: Any) -> bool:
    """Whether the parameters of a tool can be read as a schema of an object."""
    if not isinstance(parameters, dict):
        return False
    return isinstance(cast(dict[str, Any], parameters).get("properties") or {}, dict)


def arguments_of(tool_call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a recorded tool call, which are always an object."""
    return json.loads(tool_call["function"]["arguments"])


def openai_error(rejected: RequestRejected) -> dict[str, Any]:
    """An error as OpenAI's APIs write it."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    default = "server_error" if rejected.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(rejected),
            "type": kinds.get(rejected.status, default),
            "param": rejected.field or None,
            "code": rejected.code or None,
        }
    }
