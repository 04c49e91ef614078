"""What a server has answered as a model call, and a recorded call as what a server has answered."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from streamrl.envs.sessions.call_tree import CallTree, Continuation, tokens_before
from streamrl.envs.sessions.messages import Message
from streamrl.inference.clients.client import SampledCompletion
from streamrl.inference.clients.prefix import NO_PREFIX, Prefix
from streamrl.stream.records import ModelCall
from streamrl.stream.records.compact import compact_ids, compact_logprobs, wide_ids, wide_logprobs
from streamrl.stream.records.sequences import common_prefix

Fork = Literal["", "template", "edit", "compaction", "sub-agent"]


def prefix_of(tree: CallTree, continuation: Continuation) -> Prefix:
    """What the prompt of a request continues."""
    if not continuation.call:
        return NO_PREFIX
    return Prefix(
        tokens=tree.context(continuation.call).tolist(),
        server=tree.calls[continuation.call].inference_metadata.server,
        new_messages=len(continuation.new_messages),
    )


class AnswerPosition(NamedTuple):
    """Which call an answer continues, and what its request adds to that call's conversation."""

    continues: str
    fork: Fork
    messages: list[Message]
    prompt: np.ndarray  # (p,) unsigned
    kept: int = 0  # of a fork: the tokens of that call's conversation that the prompt follows


def locate_answer(
    tree: CallTree,
    conversation: list[Message],
    continuation: Continuation,
    sampled: SampledCompletion,
) -> AnswerPosition:
    """The position of an answer, which depends on the prompt that the server has made.
    `conversation`: the canonical messages of the request; empty if it consists of tokens.

    A prompt that does not keep the tokens before it may still begin with those of a call: a chat
    template often drops the same spaces as the agent. Only otherwise it is a fork.
    """
    prompt = sampled.prompt_tokens
    call, new_messages = continuation
    if sampled.prefix_tokens:
        return AnswerPosition(call, "", new_messages, prompt[sampled.prefix_tokens :])
    same_tokens = tree.find_call_by_tokens(prompt)
    if same_tokens:
        known = len(tree.conversation(same_tokens))
        if known < len(conversation) or not conversation:
            new_tokens = prompt[len(tree.context(same_tokens)) :]
            return AnswerPosition(same_tokens, "", conversation[known:], new_tokens)
    if call:
        kept = common_prefix([tree.context(call), prompt.astype(np.uint32)])
        return AnswerPosition(call, "template", new_messages, prompt[kept:], kept)
    cause = tree.cause_of_fork(conversation) if conversation else ""
    return AnswerPosition("", cast(Fork, cause), conversation, prompt)


def to_call(
    session: str,
    call: str,
    request: str,
    position: AnswerPosition,
    sampled: SampledCompletion,
    **fields: Any,
) -> ModelCall:
    """The record of an answer. `call`: its id; `request`: the name of its request.

    Here its logprobs are rounded; all that is made of the record has the same ones.
    """
    experts = sampled.routed_experts
    if experts is not None:
        experts = experts[len(sampled.prompt_tokens) - len(position.prompt) :]
    return ModelCall(
        session=session,
        call=call,
        continues=position.continues,
        fork=position.fork,
        kept=position.kept,
        request=request,
        messages=position.messages,
        prompt=compact_ids(position.prompt),
        tokens=compact_ids(sampled.tokens),
        logprobs=compact_logprobs(sampled.logprobs),
        text=sampled.text,
        inference_metadata=sampled.metadata(),
        time_s=time.time(),
        routed_experts=experts,
        **fields,
    )


def to_sampled(tree: CallTree, call: ModelCall) -> SampledCompletion:
    """What a server answered when this call was sampled. `tree` has the call that it continues."""
    tokens = wide_ids(call.tokens)
    prompt = wide_ids(call.prompt)
    before = tokens_before(tree.calls, call)
    experts = call.routed_experts
    if experts is not None:
        unknown = np.zeros((len(before), *experts.shape[1:]), experts.dtype)
        experts = np.concatenate([unknown, experts])
    metadata = call.inference_metadata
    return SampledCompletion(
        server_id=metadata.server,
        prompt_tokens=np.concatenate([before, prompt]),
        tokens=tokens,
        logprobs=wide_logprobs(call.logprobs),
        text=call.text,
        finish_reason=metadata.finish_reason,
        version_spans=metadata.version_spans,
        latency_s=metadata.latency_s,
        temperature=metadata.temperature,
        top_p=metadata.top_p,
        top_k=metadata.top_k,
        max_tokens=metadata.max_tokens,
        prefix_tokens=0 if call.fork else len(before),
        routed_experts=experts,
    )
