"""A policy that says what it is told to, over a template that keeps what was said or one that
rewrites it: one token a character.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Message
from streamrl.envs.catalog import make_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task
from streamrl.inference.clients.client import ContextFull, SampledCompletion
from streamrl.inference.clients.prefix import NO_PREFIX, Prefix
from streamrl.stream.records import Rollout, VersionSpan

END = 3  # of a turn


class Scripted:
    """Answers number 0, 1, ... of a rollout are `says[0]`, `says[1]`, ...; an exception is raised,
    a number is waited for.
    """

    def __init__(
        self,
        *says: str | Exception | float,
        rewrites: bool = False,
        keeps: bool = False,
        context: int = 10_000,
    ) -> None:
        self.says = says
        self.rewrites = rewrites
        self.keeps = keeps  # what was said, where it rewrites and is told what is new
        self.context = context
        self.prompts: list[list[int]] = []
        self.lasts: list[str] = []  # the servers that it was to go on with

    def rendered(self, messages: Sequence[Message]) -> list[int]:
        """Each message by its characters and an end; 1 opens the policy's turn. What the policy
        said is shortened where this rewrites.
        """
        texts = [
            m["content"][-1:] if self.rewrites and m["role"] == "assistant" else m["content"]
            for m in messages
        ]
        return [*(t for text in texts for t in [*map(ord, text), END]), 1]

    async def sample(
        self,
        messages: list[Message],
        n: int,
        env: Env,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: Prefix = NO_PREFIX,
    ) -> list[SampledCompletion]:
        self.lasts.append(prefix.server)
        turn = sum(message["role"] == "assistant" for message in messages)
        said = self.says[turn]
        if isinstance(said, float):
            await asyncio.sleep(said)
            said = "late"
        if isinstance(said, Exception):
            raise said
        fresh = self.rendered(messages)
        is_told = 0 < prefix.new_messages < len(messages)
        keeps = not self.rewrites or (self.keeps and is_told)
        kept = len(prefix.tokens) if keeps else 0
        new = messages[turn * 2 :]  # a conversation here goes back and forth
        prompt = (
            [*prefix.tokens, *(t for m in new for t in [*map(ord, m["content"]), END]), 1]
            if kept
            else fresh
        )
        if len(prompt) >= self.context:
            raise ContextFull("no room")
        self.prompts.append(prompt)
        reason = "length" if len(said) > env.max_tokens else "stop"
        # other ids than the same text has in a prompt
        tokens = [ord(c) + 1000 for c in said[: env.max_tokens]] + [END] * (reason == "stop")
        spans = [VersionSpan(version=turn + 2, start=0, end=len(tokens))]
        logprobs = np.full(len(tokens), -0.5, np.float32)
        sampled = SampledCompletion(
            server_id="s",
            prompt_tokens=np.array(prompt, np.uint16),
            tokens=np.array(tokens, np.uint16),
            logprobs=logprobs,
            text=said,
            finish_reason=reason,
            version_spans=spans,
            latency_s=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_tokens=9,
            prefix_tokens=kept,
        )
        return [sampled] * n


def play(
    kind: str, params: dict[str, Any], *says: str, problem: int = 0, **settings: Any
) -> Rollout:
    """A rollout of that problem, in which the policy says one after the other."""
    env: Any = make_env(kind, 1, params, "envs.x")
    runner = RolloutRunner(env, Env(max_tokens=200, **settings), Scripted(*says))
    (made,) = asyncio.run(runner.run_group(Task("x", problem, "x-0", env.problem(problem)), 1))
    assert not made.failure, made.failure
    return made


def texts(rollout: Rollout) -> list[tuple[str, str]]:
    """Role and text of each message after the problem."""
    return [(turn.role, turn.message) for turn in rollout.turns[1:]]
