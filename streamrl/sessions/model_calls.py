"""Model calls: made of what a server answers, and recorded ones as if a server had answered."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from streamrl.inference.client import Sampled
from streamrl.inference.prefix import NO_PREFIX, Prefix
from streamrl.records import ModelCall
from streamrl.sessions.call_tree import CallTree, Place
from streamrl.sessions.messages import Message

Fork = Literal["", "template", "edit", "compaction", "sub-agent"]


def prefix_of(tree: CallTree, place: Place) -> Prefix:
    """What the prompt of a request at this place goes on from."""
    if not place.continues:
        return NO_PREFIX
    return Prefix(
        tokens=tree.context(place.continues).tolist(),
        server=tree.calls[place.continues].inference_metadata.server,
        new_messages=len(place.new_messages),
    )


class Location(NamedTuple):
    """Where an answer stands in the tree, and what it adds to the conversation before it."""

    continues: str
    fork: Fork
    messages: list[Message]
    prompt: np.ndarray  # (p,) unsigned


def location(tree: CallTree, asked: list[Message], place: Place, sampled: Sampled) -> Location:
    """Where an answer stands once it is known what prompt the server has made. `asked`: the
    canonical messages of the request; empty for one of tokens.

    A prompt that does not keep the tokens before it may still begin with those of a call: a chat
    template often drops the same spaces as the agent. Only otherwise it is a fork.
    """
    prompt = sampled.prompt_tokens
    if sampled.prefix_tokens:
        return Location(place.continues, "", place.new_messages, prompt[sampled.prefix_tokens :])
    same_tokens = tree.place_of_tokens(prompt)
    if same_tokens:
        said = len(tree.conversation(same_tokens))
        if said < len(asked) or not asked:
            after = prompt[len(tree.context(same_tokens)) :]
            return Location(same_tokens, "", asked[said:], after)
    if place.continues:
        return Location(place.continues, "template", place.new_messages, prompt)
    cause = tree.cause_of_fork(asked) if asked else ""
    return Location("", cast(Fork, cause), asked, prompt)


def to_call(
    session: str, call: str, request: str, located: Location, sampled: Sampled, **fields: Any
) -> ModelCall:
    """The record of an answer. `call`: its id; `request`: the name of what was asked."""
    experts = sampled.routed_experts
    if experts is not None:
        experts = experts[len(sampled.prompt_tokens) - len(located.prompt) :]
    return ModelCall(
        session=session,
        call=call,
        continues=located.continues,
        fork=located.fork,
        request=request,
        messages=located.messages,
        prompt=located.prompt,
        tokens=sampled.tokens,
        logprobs=sampled.logprobs,
        text=sampled.text,
        inference_metadata=sampled.metadata(),
        time_s=time.time(),
        routed_experts=experts,
        **fields,
    )


def to_sampled(tree: CallTree, call: ModelCall) -> Sampled:
    """What a server answered when this call was sampled. `tree` has the call that it continues."""
    before = np.empty(0, call.tokens.dtype)
    if call.continues and not call.fork:
        before = tree.context(call.continues).astype(call.tokens.dtype)
    experts = call.routed_experts
    if experts is not None:
        unknown = np.zeros((len(before), *experts.shape[1:]), experts.dtype)
        experts = np.concatenate([unknown, experts])
    how = call.inference_metadata
    return Sampled(
        server_id=how.server,
        prompt_tokens=np.concatenate([before, call.prompt.astype(call.tokens.dtype)]),
        tokens=call.tokens,
        logprobs=call.logprobs,
        text=call.text,
        finish_reason=how.finish_reason,
        version_spans=how.version_spans,
        latency_s=how.latency_s,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        max_tokens=how.max_tokens,
        prefix_tokens=len(before),
        routed_experts=experts,
    )
