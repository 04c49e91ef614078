"""Sessions of agents: their model calls as the gateway records them, and their rewards."""

from __future__ import annotations

import math
from typing import Any, Literal

from streamrl.stream.records.fields import (
    Array,
    Name,
    Record,
    check_depth,
    check_experts,
    check_logprobs,
    check_token_ids,
)
from streamrl.stream.records.rollouts import InferenceMetadata


class SessionStart(Record, frozen=True, kw_only=True):
    """An agent begins to work on a problem through the gateway. The id of a session is the uid of
    the rollout that it becomes.
    """

    session: Name
    environment: Name
    problem_id: Name
    # Sessions of the same group are compared with each other. Empty: the assembler groups the
    # sessions of a problem in the order in which they began.
    group_id: Name = ""
    metadata: dict[str, Any] = {}  # of the rollout
    time_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.session and self.problem_id):
            raise ValueError("session and problem_id must not be empty")
        check_depth(self.metadata)


class ModelCall(Record, frozen=True, kw_only=True):
    """One model call of a session, with the very tokens that the policy saw and sampled.

    The calls of a session are a tree: `continues` is the call whose conversation this one
    continues. `prompt` has only the tokens that follow that call's answer. If the tokens before
    could not be kept, `fork` is the reason, and `prompt` follows the first `kept` of them.
    """

    session: Name
    call: Name  # its id within the session
    continues: Name = ""  # empty: it begins a conversation
    fork: Literal["", "template", "edit", "compaction", "sub-agent"] = ""
    # of a fork: its prompt begins with as many tokens of the conversation that it `continues`
    kept: int = 0
    # Names the request among those of the session. A request that is repeated under its name gets
    # the answer that it has had.
    request: Name = ""
    choice: int = 0  # the number of the answer among those to the same request
    # The messages that are new after the answer of `continues`, as OpenAI chat messages.
    messages: list[dict[str, Any]] = []
    prompt: Array  # (p,) ids
    tokens: Array  # (n,) ids: sampled
    logprobs: Array  # (n,) of the distribution sampled from
    text: str = ""  # of the answer, as the policy wrote it
    # What the agent was told of the answer: the calls of tools in it, as OpenAI chat tool calls,
    # and the text without them and without thoughts. None: all of the text.
    tool_calls: list[dict[str, Any]] = []
    content: str | None = None
    # Whether the answer is trained on. A call that is not, and that no other continues, is left out
    # of the rollout.
    trained: bool = True
    # Whether the agent had left before the answer could be sent. It is not trained on then, unless
    # a later call continues it, or the call is recorded again as one that was received.
    lost: bool = False
    inference_metadata: InferenceMetadata
    time_s: float = 0.0  # when it ended
    state: Any = None  # of the env as it asked, plain values; where it saves one
    # (p + n, layers, k): of `prompt` and then of `tokens`, as in a Turn
    routed_experts: Array | None = None

    def __post_init__(self) -> None:
        what = f"call {self.call!r} of session {self.session!r}"
        if not (self.session and self.call):
            raise ValueError("session and call must not be empty")
        for name in ("prompt", "tokens"):
            check_token_ids(f"{what}: {name}", getattr(self, name))
        check_logprobs(f"{what}: logprobs", self.logprobs, len(self.tokens))
        if self.routed_experts is not None:
            count = len(self.prompt) + len(self.tokens)
            check_experts(f"{what}: routed_experts", self.routed_experts, count)
        if not self.tokens.size:
            raise ValueError(f"{what}: nothing was sampled")
        if not math.isfinite(self.time_s):
            raise ValueError(f"{what}: its time is not finite")
        if self.call == self.continues:
            raise ValueError(f"{what} continues itself")
        if self.kept < 0 or (self.kept and not (self.fork and self.continues)):
            raise ValueError(f"{what}: kept is {self.kept}, and only a fork of a call keeps tokens")
        check_depth(self.messages)
        check_depth(self.tool_calls)
        check_depth(self.state)


class SessionEnd(Record, frozen=True, kw_only=True):
    """No more calls follow. The session becomes a rollout once its rewards are there, or at once if
    this end is the last: the assembler writes it where a session has waited for too long.
    """

    session: Name
    failure: str = ""  # why there is nothing to train on
    truncation: str = ""  # the limit that has ended it
    time_s: float = 0.0
    is_last: bool = False  # no rewards that follow count


class Reward(Record, frozen=True, kw_only=True):
    """A named reward of a rollout, from any judge and at any time."""

    rollout: Name  # its uid, which is the id of its session
    name: Name
    value: float = 0.0  # before weights
    call: Name = ""  # the model call that earned it; empty: the whole rollout
    scorer: Name = ""  # who gave it
    scorer_version: Name = ""
    failure: str = ""  # why there is no value: the rollout fails
    time_s: float = 0.0
    # given to a rollout that was published before (`streamrl rescore`): no session waits for it
    rescored: bool = False

    def __post_init__(self) -> None:
        if not (self.rollout and self.name):
            raise ValueError("rollout and name must not be empty")
        if not math.isfinite(self.value):
            raise ValueError(f"reward {self.name!r} of {self.rollout!r} is not finite")
