"""RolloutSession: one rollout, from the first request of the env to its end.

An AgentLoopEnv runs the conversation itself and asks the policy whenever it needs an answer. For
other envs the problem is the first request, and a MultiTurnEnv gives a reply after each answer,
with which the policy is asked again. Every request goes through `ask`, one after the other:

1. If the rollout has ended, or has as many turns as it may have, the request is refused.
2. If the request is in the recording, because an earlier process of the replica has asked it, the
   recorded answer is returned. So a rollout continues where that process ended.
3. Otherwise the policy samples an answer, which is recorded. If the conversation continues an
   earlier call of the rollout, the tokens of that call are sent as they were sampled.

These limits end a rollout as truncated, and keep the conversation so far: the tokens of a turn, the
number of turns, the context, the time, and a reply of the env that fails or takes too long. If a
request cannot be answered, the rollout fails. After either end the policy is not asked again,
whatever the env does.

An example: a calculator env with `max_turns` 2. The policy is asked `7*8=` and answers with a call
of the tool. The env replies 56, the policy is asked again with the whole conversation, and answers
56. If the env then replies once more, the third request ends the rollout as truncated by `turns`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import xxhash

from streamrl.config.sections.envs import EnvSettings
from streamrl.envs.api import AgentLoopEnv, BaseEnv, Message, MultiTurnEnv, Tool, Truncated
from streamrl.envs.engine.first_request import FirstRequest, Sampler
from streamrl.envs.engine.recording import SessionRecording
from streamrl.envs.engine.time_limits import (
    TimeLimitExceeded,
    in_thread,
    is_coroutine,
    with_time_limit,
)
from streamrl.envs.engine.transcript import Transcript
from streamrl.envs.sessions.call_tree import Continuation
from streamrl.envs.sessions.messages import canonical, canonical_if_possible
from streamrl.envs.sessions.model_calls import locate_answer, prefix_of, to_call, to_sampled
from streamrl.inference.clients.client import (
    ContextFull,
    SampledCompletion,
    SamplingFailed,
    SamplingTimeout,
)
from streamrl.system.errors import describe_error

MAX_STATE_BYTES = 65_536


@dataclass
class RolloutSession:
    """One rollout: its transcript, the notes of the env, and its end."""

    env: BaseEnv
    index: int  # in its group
    first_request: FirstRequest
    settings: EnvSettings
    sampler: Sampler
    transcript: Transcript
    recording: SessionRecording
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    failure: str = ""  # why there is nothing to train on
    _over: bool = False
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    # How many requests there have been, by the digest of their body.
    _requests: dict[str, int] = field(default_factory=dict[str, int])
    # The request that an env with a restored state has to make first; empty: any.
    _resumes_with: str = ""

    async def run(self) -> None:
        """Run the conversation until it ends, in whatever way."""
        limit = asyncio.timeout(self.settings.rollout_timeout_s)
        try:
            async with limit:
                if isinstance(self.env, AgentLoopEnv):
                    await self._restore(self.env)
                    await self.env.converse(self.first_request.problem, self.ask, self.notes)
                else:
                    await self._take_turns(self.env)
        except Truncated as cause:
            self._end(cause.limit, cause.note)
        except Exception as error:  # an env is another author's code
            if limit.expired():
                self._end("time")
            else:
                self._end("tool-error", describe_error(error))
        self.recording.close()
        if not self.transcript.calls and not self.failure:
            reason = self.transcript.note or self.transcript.truncation
            self.failure = reason or "the env ended it before the policy was asked"

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        demonstration: Message | None = None,
    ) -> SampledCompletion:
        """The policy's answer (`api.PolicyClient`). The requests of a rollout are answered in turn,
        so that each can continue the one before. Raises SamplingFailed once the rollout has ended,
        and the error of this request if that ends it.
        """
        async with self._asking:
            if not self._over and len(self.transcript.calls) >= self.settings.max_turns:
                self._end("turns")
            if self._over:
                reason = self.failure or self.transcript.truncation
                raise SamplingFailed(f"the rollout is over ({reason})")
            try:
                return await self._answer(list(messages), list(tools), demonstration)
            except ContextFull as error:
                self._end("context", str(error))
                raise
            except SamplingTimeout as error:
                self._end("time", str(error))
                raise
            except SamplingFailed as error:
                self._fail(str(error))
                raise
            except Exception as error:
                self._fail(describe_error(error))
                raise

    async def _restore(self, env: AgentLoopEnv) -> None:
        """Replay the recorded calls up to the last one that has a state of the env, and give the
        env that state. It then repeats the request of this call.
        """
        calls = self.recording.up_to_state()
        if not calls:
            return
        *before, last = calls
        tree = self.transcript.tree
        for call in before:
            body = call.request.partition("#")[0]
            self._requests[body] = self._requests.get(body, 0) + 1
            self.transcript.append([*tree.conversation(call.continues), *call.messages], call)
        self._resumes_with = last.request
        await env.load_state(self.first_request.problem, last.state, self.notes)

    async def _take_turns(self, env: BaseEnv) -> None:
        """The conversation of an env without a loop: the problem, and a request after each of its
        replies.
        """
        problem = self.first_request.problem
        await self.ask(problem.messages, problem.tools)
        while isinstance(env, MultiTurnEnv) and not self.transcript.truncation:
            reply = await self._reply(env)
            if not reply:
                return
            await self.ask([*self.transcript.messages, *reply], problem.tools)

    async def _reply(self, env: MultiTurnEnv) -> list[Message]:
        """The env's reply to the policy; no messages if the conversation is over. Raises Truncated
        if the reply fails or takes too long.
        """
        arguments = (self.first_request.problem, tuple(self.transcript.messages))
        try:
            if is_coroutine(env.reply):
                work = cast(Awaitable[Any], env.reply(*arguments))
            else:
                work = in_thread(env.reply, *arguments)
            reply = await with_time_limit(work, self.settings.env_timeout_s, "a reply")
            return _check_messages(reply or ())
        except TimeLimitExceeded as error:
            raise Truncated("tool-time", str(error)) from error
        except Exception as error:  # a tool that fails ends the rollout, not the env
            raise Truncated("tool-error", describe_error(error)) from error

    async def _answer(
        self, messages: list[Message], tools: list[Tool], demonstration: Message | None
    ) -> SampledCompletion:
        """The answer to a conversation: the recorded one, or a new one, which is recorded. Raises
        ValueError for a demonstration that is not text, and SamplingFailed for a request that does
        not continue from the saved state of the env.
        """
        demonstrated = _demonstrated_fields(demonstration)
        tree = self.transcript.tree
        conversation = [canonical_if_possible(message) for message in messages]
        request = self._name_request(conversation, tools)
        if self._resumes_with not in ("", request):
            raise SamplingFailed(
                "the env did not continue from its saved state with the request that is recorded;"
                " save all that converse goes by (save_state)"
            )
        self._resumes_with = ""
        call = self.recording.answer_to(request, tree)
        if call is not None:
            self.transcript.append(messages, call)
            return to_sampled(tree, call)
        state = self._state()
        await self.recording.wait_for_commit()
        continuation = tree.find_continuation(conversation)
        hint = continuation
        if tree.calls and not continuation.call:
            # The messages continue no call, but their text may. They do if the server reports that
            # the prompt begins with the tokens of that call (`prefix_tokens`).
            hint = Continuation(self.transcript.calls[-1].call, conversation)
        sampled = await self._sample(messages, tools, hint, demonstration)
        if sampled.prefix_tokens:
            continuation = hint
        call = to_call(
            self.recording.name,
            secrets.token_hex(12),
            request,
            locate_answer(tree, conversation, continuation, sampled),
            sampled,
            state=state,
            **demonstrated,
        )
        self.recording.add(call)
        self.transcript.append(messages, call)
        return sampled

    def _state(self) -> Any:
        """The env's state at this request, to be recorded with the call. None if calls are not
        recorded, or if the env has no loop. Raises ValueError if it is too large.
        """
        if self.recording.recorder is None or not isinstance(self.env, AgentLoopEnv):
            return None
        state = msgspec.msgpack.encode(self.env.save_state(self.notes))
        if len(state) > MAX_STATE_BYTES:
            raise ValueError(
                f"save_state gives {len(state):,} bytes; {MAX_STATE_BYTES:,} are allowed"
            )
        return msgspec.msgpack.decode(state)

    async def _sample(
        self,
        messages: list[Message],
        tools: list[Tool],
        hint: Continuation,
        demonstration: Message | None,
    ) -> SampledCompletion:
        """A new answer of the policy, or the demonstrated one with the policy's logprobs. `hint`:
        the call that the prompt probably continues.
        """
        tree = self.transcript.tree
        first = self.first_request
        problem = first.problem
        prefix = prefix_of(tree, hint)
        if demonstration is not None:
            (scored,) = await self.sampler.sample(
                messages, 1, self.settings, tools, prefix, demonstration
            )
            return scored
        is_first = not tree.calls and self.index in first.rollouts
        if is_first and messages == list(problem.messages) and tools == list(problem.tools):
            return (await first.answers())[first.rollouts.index(self.index)]
        (sampled,) = await self.sampler.sample(messages, 1, self.settings, tools, prefix)
        return sampled

    def _name_request(self, conversation: list[Message], tools: list[Tool]) -> str:
        """The name of this request in the session: the digest of its body, and how many requests
        with that body came before it. Empty if calls are not recorded.
        """
        if self.recording.recorder is None:
            return ""
        text = msgspec.json.encode((conversation, tools), order="deterministic")
        body = xxhash.xxh3_128_hexdigest(text)
        ordinal = self._requests.get(body, 0)
        self._requests[body] = ordinal + 1
        return f"{body}#{ordinal}"

    def _end(self, limit: str, note: str = "") -> None:
        """End the rollout as truncated by `limit`. Only the first call has an effect. It overwrites
        `length`, which `Transcript.append` sets when an answer is cut off.
        """
        if not self._over:
            self._over = True
            self.transcript.truncation = limit
            self.transcript.note = note

    def _fail(self, cause: str) -> None:
        self._over = True
        self.failure = cause


def _demonstrated_fields(demonstration: Message | None) -> dict[str, Any]:
    """The fields of a call by which a demonstrated answer is found again in the next request. The
    env sends the message, and not the text that the chat template makes of it. Raises ValueError
    for a message that a record cannot have.
    """
    if demonstration is None:
        return {}
    message = canonical(demonstration)
    return {"content": message["content"], "tool_calls": message.get("tool_calls", [])}


def _check_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages of an env's reply. Raises TypeError for anything that is not a message."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise TypeError(f"not a message with role and content but {message!r}")
    return [dict(message) for message in messages]
