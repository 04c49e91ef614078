"""The model calls of a session as a tree, and the sequences that it is trained as.

Each call continues the conversation of an earlier call, or begins one. The gateway looks up which
call a new request continues (`CallTree`). The assembler makes the fewest training sequences of all
calls (`sequences`), in which each sampled token appears once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from msgspec import structs

from streamrl.envs.sessions import messages
from streamrl.envs.sessions.messages import EMPTY, Message
from streamrl.stream.records import ModelCall
from streamrl.stream.records.compact import wide_ids


class Continuation(NamedTuple):
    """How a request continues the tree."""

    call: str  # the call whose conversation it continues; empty: it begins one
    new_messages: list[Message]  # those after that call's answer


class InvalidCall(ValueError):
    """A call that does not fit the calls before it; the message is the reason."""


class CallTree:
    """The calls of one session in the order of the log. Finds the call that a request continues."""

    def __init__(self) -> None:
        self.calls: dict[str, ModelCall] = {}
        self._answers: dict[str, dict[int, str]] = {}  # request -> number of the answer -> call
        self._conversations: dict[bytes, str] = {}  # digest of a conversation -> call that ends it
        self._digests: dict[str, bytes] = {}  # call -> digest of its conversation
        self._contexts: dict[bytes, str] = {}  # digest of all tokens up to an answer -> call
        self._context_lengths: dict[str, int] = {}  # call -> number of these tokens
        self._not_indexed: list[ModelCall] = []  # by digests, which many sessions never need

    def add(self, call: ModelCall) -> bool:
        """Add the next call of the log. False: its request already has this answer, or another, so
        the call does not count. The last record of a call tells whether its answer was lost.

        Raises InvalidCall if it continues a call that is not in the tree.
        """
        known = self.calls.get(call.call)
        if known is not None and known.lost != call.lost:
            self.calls[call.call] = structs.replace(known, lost=call.lost)
        if known is not None or call.choice in self._answers.get(call.request, ()):
            return False
        if call.continues and call.continues not in self.calls:
            raise InvalidCall(
                f"call {call.call!r} continues {call.continues!r}, which is no call before it"
            )
        self.calls[call.call] = call
        if call.request:
            self._answers.setdefault(call.request, {})[call.choice] = call.call
        self._not_indexed.append(call)
        return True

    def answers(self, request: str) -> list[ModelCall]:
        """The answers that a request has had, by their numbers."""
        return [self.calls[call] for _, call in sorted(self._answers.get(request, {}).items())]

    def find_continuation(
        self, conversation: Sequence[Message], digests: Sequence[bytes] | None = None
    ) -> Continuation:
        """How a request with these canonical messages continues the tree. It continues the call
        with the longest conversation that the request begins with. `digests`: those of the
        conversation up to each message, where they are known.
        """
        if not self.calls:
            return Continuation("", list(conversation))
        self._index()
        if digests is None:
            digests = messages.digests(conversation)
        longest_call = ""
        known = 0
        for number, digest in enumerate(digests[:-1], 1):
            call = self._conversations.get(digest)
            if call is not None:
                longest_call = call
                known = number
        return Continuation(longest_call, list(conversation[known:]))

    def find_call_by_tokens(self, prompt: np.ndarray) -> str:
        """The call with the most tokens that this prompt begins with; empty if there is none.

        `prompt`: (p,) ids of any integer type.
        """
        if not self.calls:
            return ""
        self._index()
        longest_call = ""
        ids = prompt.astype(np.uint32)
        digest = xxhash.xxh3_128()
        before = 0
        for length in sorted(set(self._context_lengths.values())):
            if length >= len(ids):
                break
            digest.update(ids[before:length].tobytes())
            before = length
            longest_call = self._contexts.get(digest.digest(), longest_call)
        return longest_call

    def context(self, call: str) -> np.ndarray:
        """All tokens up to the end of the call's answer: (n,) uint32."""
        return context(self.calls, call)

    def conversation(self, call: str) -> list[Message]:
        """All messages up to the call's answer. Answers are as the policy wrote them, so that a
        chat template writes them again as they were sampled.
        """
        return self._conversation(call, lambda at: {"role": "assistant", "content": at.text})

    def visible_conversation(self, call: str) -> list[Message]:
        """All messages up to the call's answer. Answers are as the agent has received them."""
        return self._conversation(call, visible_message)

    def cause_of_fork(self, conversation: Sequence[Message]) -> str:
        """Why a request with these canonical messages, which continues no call, begins a
        new conversation although there have been others.
        """
        firsts = [call for call in self.calls.values() if not call.continues]
        conversation = list(conversation)
        if not firsts or any(call.messages == conversation for call in firsts):
            return ""  # it is the first, or asked once more
        if all(call.messages[:1] != conversation[:1] for call in firsts):
            return "sub-agent"
        return "compaction" if len(conversation) < self._longest else "edit"

    def _conversation(self, call: str, to_message: Callable[[ModelCall], Message]) -> list[Message]:
        """All messages up to the call's answer. `to_message`: writes an answer as a message."""
        parts = list[list[Message]]()
        while call:
            at = self.calls[call]
            parts.append([*at.messages, to_message(at)])
            call = at.continues
        return [message for part in reversed(parts) for message in part]

    def _index(self) -> None:
        """Index each new call by the digests of its conversation and of its tokens."""
        for call in self._not_indexed:
            before = self._digests[call.continues] if call.continues else EMPTY
            digest = messages.digest(before, [*call.messages, visible_message(call)])
            self._digests[call.call] = digest
            self._conversations.setdefault(digest, call.call)
            tokens = self.context(call.call)
            self._contexts.setdefault(xxhash.xxh3_128_digest(tokens.tobytes()), call.call)
            self._context_lengths[call.call] = len(tokens)
        self._not_indexed.clear()

    @property
    def _longest(self) -> int:
        """The number of messages of the longest conversation, up to its last answer."""
        lengths = dict[str, int]()
        for call in self.calls.values():  # those that a call continues come before it
            before = lengths[call.continues] if call.continues else 0
            lengths[call.call] = before + len(call.messages) + 1
        return max(lengths.values())


def visible_message(call: ModelCall) -> Message:
    """The answer as the agent has received it, in canonical form."""
    message: Message = {"role": "assistant", "content": visible_text(call)}
    if call.tool_calls:
        message["tool_calls"] = [messages.canonical_call(tool) for tool in call.tool_calls]
    return message


def visible_text(call: ModelCall) -> str:
    """The text of the answer as the agent has received it: without calls of tools."""
    return call.text if call.content is None else call.content


def context(calls: Mapping[str, ModelCall], call: str) -> np.ndarray:
    """All tokens up to the end of a call's answer: (n,) uint32."""
    conversation = list[ModelCall]()
    while call:
        conversation.append(calls[call])
        call = "" if calls[call].fork and not calls[call].kept else calls[call].continues
    pieces = list[np.ndarray]()
    for at in reversed(conversation):
        if at.fork:
            pieces = [np.concatenate(pieces)[: at.kept]] if pieces else []
        pieces += [wide_ids(at.prompt), wide_ids(at.tokens)]
    return np.concatenate(pieces).astype(np.uint32)


def tokens_before(calls: Mapping[str, ModelCall], call: ModelCall) -> np.ndarray:
    """The tokens that the call's own prompt follows: (n,) uint32."""
    if not call.continues or (call.fork and not call.kept):
        return np.zeros(0, np.uint32)
    before = context(calls, call.continues)
    return before[: call.kept] if call.fork else before


def sequences(calls: Iterable[ModelCall]) -> list[list[ModelCall]]:
    """The calls of a session as the fewest sequences such that the tokens of each call continue
    those of the call before it in its sequence.

    The first sequence begins with the first call. Of several calls that continue the same tokens
    the first stays in their sequence. Each other begins a sequence, whose prompt is all tokens
    before it. So each call is in one sequence, and there are as many sequences as calls that no
    other continues.
    """
    result = list[list[ModelCall]]()
    ends = dict[str, int]()  # the call that a sequence ends with -> the sequence
    for call in calls:
        number = None if call.fork else ends.pop(call.continues, None)
        if number is None:
            number = len(result)
            result.append([])
        result[number].append(call)
        ends[call.call] = number
    return result
