"""What becomes of each field of a request: one list for all APIs of the gateway.

A field is honoured, harmless, left out or refused. Harmless fields change nothing about an answer.
What is left out cannot be kept, and the answer is right without it, such as tools that only the
API's own servers run; the response header `x-streamrl-left-out` has its name. Everything else that
would change the distribution, the prompt or the shape of the answer is refused with its name. So is
a field that is not in the list: the APIs themselves refuse what they do not know.

The lists have the fields of OpenAI's and Anthropic's own types, which
tests/extensions/gateway/test_fields.py compares with the installed packages, and what vLLM and
other servers add to them. null is no value: it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from streamrl.extensions.gateway.requests import Body, RequestRejected
from streamrl.system.text import did_you_mean, printable

Outcome = Literal["honoured", "harmless", "left out", "refused"]
LEFT_OUT_HEADER = "x-streamrl-left-out"
MAX_HEADER = 1_000  # characters


class Rule(NamedTuple):
    """What becomes of a field, and of the fields inside it."""

    outcome: Outcome
    reason: str = ""
    neutral: tuple[Any, ...] = ()  # values that change nothing, whatever the outcome of others
    # Those of the object, or of each object of the list. None: any are taken.
    fields: Mapping[str, Rule] | None = None
    # The rule of an object by its `type`; that of "" is for objects without one.
    kinds: Mapping[str, Rule] | None = None


def refused(reason: str, *neutral: Any) -> Rule:
    return Rule("refused", reason, neutral)


def left_out(reason: str, *neutral: Any) -> Rule:
    return Rule("left out", reason, neutral)


def inside(**fields: Rule) -> Rule:
    """An object, or a list of objects, whose fields have rules too."""
    return Rule("honoured", fields=fields)


def by_kind(kinds: Mapping[str, Rule]) -> Rule:
    """A list of objects that differ by their `type`."""
    return Rule("honoured", kinds=kinds)


def all_of(names: Iterable[str], rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


HONOURED = Rule("honoured")
HARMLESS = Rule("harmless")
SAMPLING = left_out("the settings of the env count, which x-streamrl-sampling has")
EFFORT = left_out("how much the policy thinks and writes is what it is trained for")
STRICT = left_out("the policy writes the arguments without a constraint", False)
TOOL = left_out("only the servers of the API have this tool")
UNKNOWN = left_out("the gateway does not know it")
DISTRIBUTION = "the policy is trained on what it samples, so this cannot be kept; leave it out"
CONSTRAINT = (
    "the policy is trained on what it samples, which is not constrained; describe the format in a"
    " message"
)
PROMPT = "the prompt is the whole conversation as the model's chat template writes it"
SHAPE = "an answer of the gateway does not have this; leave it out"
STATE = "the gateway keeps the calls of a session and nothing else; send the conversation"
NO_MEDIA = "the policy reads text only"
PREFILL = "the policy begins its own answers"
OTHER_TOOL_ITEM = refused("it belongs to a tool that only the servers of the API have")

# What vLLM and other servers add, which a client may put into a body of any API.
EXTENSIONS: dict[str, Rule] = {
    "model": HONOURED,
    "metadata": HONOURED,
    "stream": HONOURED,
    "return_token_ids": HONOURED,
    **all_of(("temperature", "top_p", "top_k", "seed"), SAMPLING),
    # How the policy samples.
    "logit_bias": refused(DISTRIBUTION, {}),
    "presence_penalty": refused(DISTRIBUTION, 0),
    "frequency_penalty": refused(DISTRIBUTION, 0),
    "repetition_penalty": refused(DISTRIBUTION, 1),
    "length_penalty": refused(DISTRIBUTION, 1),
    "min_p": refused(DISTRIBUTION, 0),
    "stop": refused(DISTRIBUTION, [], ""),
    "stop_token_ids": refused(DISTRIBUTION, []),
    "min_tokens": refused(DISTRIBUTION, 0),
    "bad_words": refused(DISTRIBUTION, []),
    "allowed_token_ids": refused(DISTRIBUTION, []),
    "logits_processors": refused(DISTRIBUTION, []),
    "ignore_eos": refused(DISTRIBUTION, False),
    "use_beam_search": refused(DISTRIBUTION, False),
    "best_of": refused(DISTRIBUTION, 1),
    "watermarking": refused(DISTRIBUTION, False),
    "thinking_token_budget": refused(DISTRIBUTION, -1),
    "repetition_detection": refused(DISTRIBUTION),
    "vllm_xargs": refused(DISTRIBUTION, {}),
    # How its answer is constrained.
    "response_format": refused(CONSTRAINT, {"type": "text"}),
    **all_of(
        (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "structural_tag",
        ),
        refused(CONSTRAINT, {}),
    ),
    # The prompt.
    "chat_template": refused("the chat template is the model's"),
    "chat_template_kwargs": refused(
        "set it in the run file (envs.<name>.chat_template_kwargs), or use chat completions", {}
    ),
    "documents": refused(PROMPT, []),
    "truncate_prompt_tokens": refused(PROMPT, -1),
    "truncation_side": HARMLESS,
    "add_generation_prompt": refused(PREFILL, True),
    "continue_final_message": refused(PREFILL, False),
    "add_special_tokens": refused(PROMPT, False),
    "previous_input_messages": refused(PROMPT, []),
    # The shape of the answer.
    "n": refused("this API gives one answer to a request", 1),
    "echo": refused(SHAPE, False),
    "prompt_logprobs": refused(SHAPE),
    "top_logprobs": refused(SHAPE, 0),
    "logprob_token_ids": refused(SHAPE, []),
    "return_token_offsets": refused(SHAPE, False),
    "return_prompt_text": refused(SHAPE, False),
    "return_mm_kwargs": refused(SHAPE, False),
    "enable_response_messages": refused(SHAPE, False),
    "routed_experts_prompt_start": refused(SHAPE, 0),
    "kv_transfer_params": refused(SHAPE, {}),
    "ec_transfer_params": refused(SHAPE, {}),
    # Special tokens are always in the text, no stop is taken, and token ids are always named.
    **all_of(
        (
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "return_tokens_as_token_ids",
        ),
        HARMLESS,
    ),
    # Who asks, and how it is served.
    **all_of(
        (
            "user",
            "priority",
            "request_id",
            "session_id",
            "cache_salt",
            "stream_interval",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "mm_payload",
            "client_metadata",
            "service_tier",
            "provider",
            "usage",
        ),
        HARMLESS,
    ),
}

CACHE = all_of(("cache_control", "prompt_cache_breakpoint"), HARMLESS)
# What libraries send back with a message because an answer, or their own copy of it, has it.
ECHOED = all_of(
    ("id", "type", "status", "phase", "annotations", "provider_specific_fields", "index"), HARMLESS
)
TEXT_PART = inside(type=HONOURED, text=HONOURED, citations=HARMLESS, logprobs=HARMLESS, **CACHE)
CHAT_PARTS: dict[str, Rule] = {
    "": TEXT_PART,
    **all_of(
        ("text", "input_text", "output_text"),
        TEXT_PART._replace(fields={**(TEXT_PART.fields or {}), **ECHOED}),
    ),
    "refusal": inside(type=HONOURED, refusal=HONOURED),
    "thinking": inside(type=HONOURED, thinking=HONOURED, signature=HARMLESS, closed=HARMLESS),
    **all_of(("image_url", "input_audio", "file"), refused(NO_MEDIA)),
}
CHAT_FUNCTION = inside(
    name=HONOURED, description=HONOURED, parameters=HONOURED, strict=STRICT, **CACHE
)
CHAT_CUSTOM = inside(
    name=HONOURED,
    description=HONOURED,
    format=left_out("the policy writes the text without a constraint", {"type": "text"}),
)
CHAT_TOOLS: dict[str, Rule] = {
    "": inside(type=HONOURED, function=CHAT_FUNCTION, **CACHE),
    "function": inside(type=HONOURED, function=CHAT_FUNCTION, **CACHE),
    "custom": inside(type=HONOURED, custom=CHAT_CUSTOM, **CACHE),
}
TOOL_CHOICE = Rule("honoured", "auto or none; the policy decides whether it calls a tool")

CHAT: dict[str, Rule] = {
    **EXTENSIONS,
    "messages": inside(
        role=HONOURED,
        content=by_kind(CHAT_PARTS),
        name=HONOURED,
        tool_calls=HONOURED,
        tool_call_id=HONOURED,
        reasoning_content=HONOURED,
        reasoning=HONOURED,
        refusal=left_out("the policy reads the content of a message", ""),
        audio=refused(NO_MEDIA),
        function_call=refused("give tool_calls"),
        prefix=refused(PREFILL, False),
        partial=refused(PREFILL, False),
        **CACHE,
        **ECHOED,
    ),
    "tools": by_kind(CHAT_TOOLS),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": HONOURED,
    "n": HONOURED,
    "max_tokens": HONOURED,
    "max_completion_tokens": HONOURED,
    "chat_template_kwargs": HONOURED,
    "logprobs": HONOURED,
    "include_reasoning": HONOURED,
    "stream_options": inside(
        include_usage=HONOURED, include_obfuscation=HARMLESS, continuous_usage_stats=HARMLESS
    ),
    "functions": refused("give tools", []),
    "function_call": refused("give tool_choice", "auto", "none"),
    "modalities": refused("the policy writes text only", ["text"]),
    "audio": refused("the policy writes text only"),
    "moderation": refused(SHAPE),
    "web_search_options": refused("the policy has the tools that the agent runs"),
    "enable_thinking": refused("give it in chat_template_kwargs"),
    "thinking_budget": refused(DISTRIBUTION),
    **all_of(("reasoning_effort", "verbosity"), EFFORT),
    **all_of(
        (
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "store",
        ),
        HARMLESS,
    ),
}

RESPONSES_PARTS: dict[str, Rule] = {
    "": TEXT_PART,
    **all_of(
        ("text", "input_text", "output_text"),
        TEXT_PART._replace(fields={**(TEXT_PART.fields or {}), **ECHOED}),
    ),
    "refusal": inside(type=HONOURED, refusal=HONOURED),
    **all_of(("input_image", "input_file", "input_audio"), refused(NO_MEDIA)),
}
# How a call of a tool came about where a program of the API's servers makes it.
CALLERS = all_of(("caller", "namespace", "async"), UNKNOWN)
RESPONSES_MESSAGE = inside(
    role=HONOURED, content=by_kind(RESPONSES_PARTS), **ECHOED
)  # An item without a type may be a reference, which has nothing but an id.
RESPONSES_CALL = inside(call_id=HONOURED, name=HONOURED, arguments=HONOURED, **CALLERS, **ECHOED)
RESPONSES_OUTPUT = inside(
    call_id=HONOURED, output=by_kind(RESPONSES_PARTS), name=HARMLESS, **CALLERS, **ECHOED
)
RESPONSES_INPUT: dict[str, Rule] = {
    "": RESPONSES_MESSAGE,
    "message": RESPONSES_MESSAGE,
    "function_call": RESPONSES_CALL,
    "function_call_output": RESPONSES_OUTPUT,
    "custom_tool_call": inside(
        call_id=HONOURED, name=HONOURED, input=HONOURED, **CALLERS, **ECHOED
    ),
    "custom_tool_call_output": RESPONSES_OUTPUT,
    "item_reference": inside(**{**ECHOED, "id": HONOURED}),
    "reasoning": inside(summary=HONOURED, content=HONOURED, encrypted_content=HARMLESS, **ECHOED),
    **all_of(
        (
            "file_search_call",
            "computer_call",
            "computer_call_output",
            "web_search_call",
            "tool_search_call",
            "tool_search_output",
            "image_generation_call",
            "code_interpreter_call",
            "local_shell_call",
            "local_shell_call_output",
            "shell_call",
            "shell_call_output",
            "apply_patch_call",
            "apply_patch_call_output",
            "mcp_list_tools",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "program",
            "program_output",
        ),
        OTHER_TOOL_ITEM,
    ),
    **all_of(
        ("additional_tools", "configuration_update"), refused("tools are given in `tools` only")
    ),
    **all_of(("compaction", "compaction_trigger"), refused(PROMPT)),
}
LATER_TOOLS = all_of(("defer_loading", "allowed_callers", "async"), UNKNOWN)
RESPONSES_TOOLS: dict[str, Rule] = {
    "function": inside(
        type=HONOURED,
        name=HONOURED,
        description=HONOURED,
        parameters=HONOURED,
        strict=STRICT,
        output_schema=UNKNOWN,
        **LATER_TOOLS,
        **CACHE,
    ),
    "custom": inside(
        type=HONOURED,
        name=HONOURED,
        description=HONOURED,
        format=(CHAT_CUSTOM.fields or {})["format"],
        **LATER_TOOLS,
    ),
    **all_of(
        (
            "namespace",
            "tool_search",
            "file_search",
            "computer",
            "computer_use_preview",
            "web_search",
            "web_search_2025_08_26",
            "web_search_preview",
            "web_search_preview_2025_03_11",
            "mcp",
            "code_interpreter",
            "programmatic_tool_calling",
            "image_generation",
            "local_shell",
            "shell",
            "apply_patch",
        ),
        TOOL,
    ),
}
# What may be asked for with an answer. The rest is of tools that the policy does not have.
INCLUDES = {
    "reasoning.encrypted_content": HARMLESS,
    "message.output_text.logprobs": refused(
        "set logprobs in a chat completion, or return_token_ids; leave it out here"
    ),
    **all_of(
        (
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "message.input_image.image_url",
            "computer_call_output.output.image_url",
            "code_interpreter_call.outputs",
        ),
        HARMLESS,
    ),
}

RESPONSES: dict[str, Rule] = {
    **EXTENSIONS,
    "input": by_kind(RESPONSES_INPUT),
    "instructions": HONOURED,
    "tools": by_kind(RESPONSES_TOOLS),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": HONOURED,
    "max_output_tokens": HONOURED,
    "previous_response_id": HONOURED,
    "store": HONOURED,
    "include": Rule("honoured", kinds=INCLUDES),
    "text": inside(format=refused(CONSTRAINT, {"type": "text"}), verbosity=EFFORT),
    "reasoning": inside(
        effort=EFFORT,
        summary=HONOURED,
        generate_summary=HONOURED,
        context=left_out("the policy keeps its thoughts as its chat template does", "auto"),
        mode=EFFORT,
    ),
    "truncation": refused("a conversation is never cut; give disabled", "disabled"),
    "max_tool_calls": refused("it is of tools that only the servers of the API have"),
    "context_management": refused(PROMPT, []),
    "background": refused("the answer comes with the response", False),
    "conversation": refused(STATE),
    "personality": refused(PROMPT),
    "prompt": refused(STATE),
    "moderation": refused(SHAPE),
    "image": HARMLESS,
    "access_programs": HARMLESS,
    "stream_options": inside(include_obfuscation=HARMLESS, include_usage=HARMLESS),
    **all_of(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        HARMLESS,
    ),
}

BLOCK = {**CACHE, "type": HONOURED}
MESSAGES_TEXT = inside(text=HONOURED, citations=HARMLESS, **BLOCK)
RESULT_BLOCKS: dict[str, Rule] = {
    "": MESSAGES_TEXT,
    "text": MESSAGES_TEXT,
    **all_of(
        ("image", "document", "search_result", "tool_reference", "browser_state"),
        refused(NO_MEDIA),
    ),
}
MESSAGES_BLOCKS: dict[str, Rule] = {
    **RESULT_BLOCKS,
    "tool_use": inside(
        id=HONOURED, name=HONOURED, input=HONOURED, caller=UNKNOWN, toolset_name=UNKNOWN, **BLOCK
    ),
    "tool_result": inside(
        tool_use_id=HONOURED,
        content=by_kind(RESULT_BLOCKS),
        is_error=HONOURED,
        toolset_name=UNKNOWN,
        **BLOCK,
    ),
    "thinking": inside(thinking=HONOURED, signature=HARMLESS, **BLOCK),
    "redacted_thinking": inside(data=HARMLESS, **BLOCK),
    **all_of(
        (
            "server_tool_use",
            "web_search_tool_result",
            "web_fetch_tool_result",
            "advisor_tool_result",
            "code_execution_tool_result",
            "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result",
            "tool_search_tool_result",
            "mcp_tool_use",
            "mcp_tool_result",
            "mcp_tool_listing",
        ),
        OTHER_TOOL_ITEM,
    ),
    **all_of(("tool_addition", "tool_removal"), refused("tools are given in `tools` only")),
    **all_of(("container_upload", "compaction", "fallback"), refused(STATE)),
}
MESSAGES_TOOL = inside(
    name=HONOURED,
    description=HONOURED,
    input_schema=HONOURED,
    strict=STRICT,
    input_examples=UNKNOWN,
    defer_loading=left_out("all tools are in the prompt from the start", False),
    allowed_callers=UNKNOWN,
    eager_input_streaming=HARMLESS,
    **BLOCK,
)
MESSAGES_TOOLS: dict[str, Rule] = {
    "": MESSAGES_TOOL,
    "custom": MESSAGES_TOOL,
    **all_of(
        (
            "bash_20241022",
            "bash_20250124",
            "code_execution_20250522",
            "code_execution_20250825",
            "code_execution_20260120",
            "code_execution_20260521",
            "browser_toolset_20260801",
            "computer_20241022",
            "computer_20250124",
            "computer_20251124",
            "computer_toolset_20260801",
            "memory_20250818",
            "text_editor_20241022",
            "text_editor_20250124",
            "text_editor_20250429",
            "text_editor_20250728",
            "web_search_20250305",
            "web_search_20260209",
            "web_search_20260318",
            "web_fetch_20250910",
            "web_fetch_20260209",
            "web_fetch_20260309",
            "web_fetch_20260318",
            "advisor_20260301",
            "tool_search_tool_bm25",
            "tool_search_tool_bm25_20251119",
            "tool_search_tool_regex",
            "tool_search_tool_regex_20251119",
            "mcp_toolset",
        ),
        left_out("it has no schema that the policy could read"),
    ),
}
OUTPUT_CONFIG = inside(
    effort=EFFORT,
    format=refused(CONSTRAINT),
    task_budget=refused("the policy does not know of a budget"),
)
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}

MESSAGES: dict[str, Rule] = {
    **EXTENSIONS,
    "messages": inside(
        role=HONOURED,
        content=by_kind(MESSAGES_BLOCKS),
        clear_at=left_out("a message stays in the conversation, whose tokens are kept", "never"),
        output_config=OUTPUT_CONFIG,
        **ECHOED,
    ),
    "system": by_kind({"": MESSAGES_TEXT, "text": MESSAGES_TEXT}),
    "tools": by_kind(MESSAGES_TOOLS),
    "tool_choice": TOOL_CHOICE,
    "max_tokens": HONOURED,
    "thinking": inside(
        type=HONOURED,
        display=HONOURED,
        budget_tokens=EFFORT,
        block_binding=HARMLESS,
    ),
    "output_config": OUTPUT_CONFIG,
    "output_format": refused(CONSTRAINT),
    "stop_sequences": refused(DISTRIBUTION, []),
    # The thoughts of a conversation are the sampled tokens, which are all kept.
    "context_management": inside(edits=refused(PROMPT, [], [KEEP_ALL])),
    "compaction": refused(PROMPT),
    "thread": refused(STATE),
    "container": refused(STATE),
    "mcp_servers": refused("the policy has the tools that the agent runs", []),
    **all_of(
        (
            "cache_control",
            "diagnostics",
            "inference_geo",
            "speed",
            "user_profile_id",
            "workspace_id",
            "billing_policy",
            "fallback_credit_token",
            "fallbacks",
            "betas",
            "anthropic_version",
            "anthropic_beta",
        ),
        HARMLESS,
    ),
}

TOKEN_IDS: dict[str, Rule] = {
    **EXTENSIONS,
    "token_ids": HONOURED,
    "stream": refused("token ids come in one piece", False),
    "stream_options": HARMLESS,
    "sampling_params": Rule(
        "honoured",
        fields={
            **EXTENSIONS,
            "n": HONOURED,
            "max_tokens": HONOURED,
            "logprobs": refused("the sampled tokens have theirs; give 0 or 1", 0, 1),
            **all_of(("output_kind", "detokenize", "flat_logprobs"), HARMLESS),
        },
    ),
    "features": refused(NO_MEDIA),
    "content_parts": refused(NO_MEDIA, []),
    "token_offsets": HARMLESS,
    "output_mode": HARMLESS,
    "reasoning_ended": HARMLESS,
    "reasoning_parser_kwargs": HARMLESS,
}

FIELDS: dict[str, dict[str, Rule]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKEN_IDS,
}


def check_fields(fields: Mapping[str, Rule], body: Body) -> list[str]:
    """The names of what is left out of a request. Raises RequestRejected for what is refused."""
    return list(dict.fromkeys(_names_left_out(fields, body, "", "")))


def _names_left_out(
    fields: Mapping[str, Rule], value: Mapping[str, Any], path: str, in_list: str
) -> Iterator[str]:
    """`path`: of the object. `in_list`: the field of the body that is a list with this object.
    Objects in lists come from libraries that add to them, so a field that no rule has is left out
    of them, and refused elsewhere.
    """
    for name, inner in value.items():
        rule = fields.get(name) or (UNKNOWN if in_list else _no_field(name, fields))
        yield from _apply(rule, inner, f"{path}.{name}" if path else name, in_list)


def _no_field(name: str, fields: Mapping[str, Rule]) -> Rule:
    """The rule of a field that is not in the list."""
    honoured = [known for known, rule in fields.items() if rule.outcome == "honoured"]
    hint = did_you_mean(name, honoured) or "leave it out"
    return refused(f"this API of the gateway does not have this field; {hint}")


def _apply(rule: Rule, value: Any, path: str, in_list: str) -> Iterator[str]:
    if value is None or value in rule.neutral:
        return
    if rule.outcome == "refused":
        raise RequestRejected(400, f"{path}: {rule.reason}", in_list or path)
    if rule.outcome == "left out":
        yield path
    elif isinstance(value, dict) and rule.fields is not None:
        yield from _names_left_out(rule.fields, cast(Mapping[str, Any], value), path, in_list)
    elif isinstance(value, list):
        for index, item in enumerate(cast(Sequence[Any], value)):
            yield from _apply_to_item(rule, item, path, index, in_list or path)


def _apply_to_item(rule: Rule, item: Any, path: str, index: int, in_list: str) -> Iterator[str]:
    if rule.kinds is not None:
        kind = item.get("type") or "" if isinstance(item, dict) else item
        known = rule.kinds.get(kind) if isinstance(kind, str) else None
        at = f"{path}[{index}]"
        if known is None or known.outcome == "left out":
            yield from _apply_to_unknown(known, item, kind, at, in_list)
            return
        if known.outcome == "refused":
            raise RequestRejected(400, f"{at}: {kind}: {known.reason}", in_list)
        rule = known
    if isinstance(item, dict) and rule.fields is not None:
        yield from _names_left_out(rule.fields, cast(Mapping[str, Any], item), path, in_list)


def _apply_to_unknown(
    known: Rule | None, item: Any, kind: Any, at: str, in_list: str
) -> Iterator[str]:
    """An object whose type the policy cannot have. A tool is left out; anything else would be
    missed in the conversation.
    """
    if known is None and in_list not in ("tools", "include"):
        raise RequestRejected(400, f"{at}: the type {kind!r} is not known", in_list)
    name = item.get("name") if isinstance(item, dict) else None
    yield f"{at} ({kind} {name})" if isinstance(name, str) else f"{at} ({kind})"


def left_out_header(names: Sequence[str]) -> dict[str, str]:
    """The response header that has what was left out of a request."""
    if not names:
        return {}
    # Names of fields come from the agent, and a header with a control character is never sent.
    text = printable(", ".join(names[:MAX_HEADER]), MAX_HEADER)[:MAX_HEADER]
    return {LEFT_OUT_HEADER: text.encode("ascii", "replace").decode()}


def is_given_tool(fields: Mapping[str, Rule], tool: Mapping[str, Any]) -> bool:
    """Whether the policy gets this tool of a request."""
    kind = tool.get("type") or ""
    known = (fields["tools"].kinds or {}).get(kind) if isinstance(kind, str) else None
    return known is not None and known.outcome == "honoured"
