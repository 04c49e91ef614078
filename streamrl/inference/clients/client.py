"""The client that envs sample with. It asks a live server of their pool (`registry.py`) for n
answers to a prompt, with everything that the learner has to know about each token.

A call makes two requests: `/v1/chat/completions/render` turns messages into the server's own prompt
tokens, and vLLM's token-in token-out `/inference/v1/generate` samples. A plain chat completion has
token ids and logprobs too, but does not report which policy version made which token. A
conversation continues from the tokens that it has (`prefix.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from streamrl.config.run_file import RunFile
from streamrl.config.secrets import resolve_reference
from streamrl.config.sections.envs import EnvSettings, FreelySampled
from streamrl.config.topology import GENERATION
from streamrl.inference.clients.demonstrations import (
    ScoredDemonstration,
    UnusableDemonstration,
    demonstrated_tokens,
    score_demonstration,
)
from streamrl.inference.clients.prefix import NO_PREFIX, Prefix
from streamrl.inference.clients.prompts import Conversation, make_prompt
from streamrl.inference.clients.registry import Registry
from streamrl.inference.clients.server_connection import (
    RequestFailed,
    ServerConnection,
    ServerRejected,
)
from streamrl.inference.clients.vllm_api import GeneratedChoice, GenerateResponse, experts_of
from streamrl.stream.log.protocol import Event, TopicPartition
from streamrl.stream.records import InferenceMetadata, Server, VersionSpan, token_dtype
from streamrl.system.offloading import Offloader
from streamrl.system.tuning import descriptor_limit

logger = logging.getLogger(__name__)

REGISTRY_POLL_S = 0.05  # The interval of looking for a server while there is none.
REPORT_S = 10.0
# Of the choices that a server answers at a time. Its JSON has about 100 bytes for each, and Python
# runs nothing else while it is decoded.
ANSWER_TOKENS = 65_536
CHOICE_TOKEN_BYTES = 32  # what one takes in a choice that is decoded
# The errors of reading an answer that is not as expected.
UNUSABLE = (TypeError, ValueError, OverflowError)
CONTEXT = "maximum context length"  # in a server's error for a prompt that is too long


class SamplingFailed(Exception):
    """Nothing was sampled, and the message has the cause. An env publishes it as the failure of its
    rollouts.
    """


class ContextFull(SamplingFailed):
    """The prompt leaves no room for an answer."""


class SamplingRejected(SamplingFailed):
    """A server refuses the request as it is, so another one would refuse it too."""


class SamplingTimeout(SamplingFailed):
    """None of the servers that were asked answered in time."""


# What SamplingTimeout gives as its cause: `A attempts failed; SERVER: no answer within S s; ...`.
LATE = r"[^;]*: no answer within \S+ s"
TOO_LATE = re.compile(rf"(\d+ attempts failed; )?({LATE}|no answer within \S+ s)(; {LATE})*")


def is_too_late(cause: str) -> bool:
    """Whether this failure of a rollout is that no server answered it in time, or that it took
    longer than `rollout_timeout_s`. False if any of the servers failed in another way.
    """
    return cause == "time" or TOO_LATE.fullmatch(cause) is not None


class ServerFailed(Exception):
    """This server did not answer. Another one may."""


class ServerTimeout(ServerFailed):
    """The server did not answer in time."""


class SampledCompletion(NamedTuple):
    """One completion, with the prompt that the policy was given."""

    server_id: str
    prompt_tokens: np.ndarray  # (p,) unsigned
    tokens: np.ndarray  # (n,) unsigned: sampled; the closing end-of-sequence token is one of them
    # (n,) float32: of the distribution sampled from (temperature, top-p and top-k applied)
    logprobs: np.ndarray
    # of `tokens`, without the closing end-of-sequence token; other special tokens are shown
    text: str
    finish_reason: str  # stop, or length: cut off
    version_spans: list[VersionSpan]  # tile `tokens`
    latency_s: float
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    # How many of the prompt's tokens are the given history. 0 if none was given, or if the template
    # rewrote it.
    prefix_tokens: int = 0
    # (p + n, layers, k) uint8 or uint16: where the server sent the tokens of the prompt and then
    # its own, as in a Turn; None: it does not report them
    routed_experts: np.ndarray | None = None

    def metadata(self) -> InferenceMetadata:
        """The record of how this was sampled."""
        return InferenceMetadata(
            server=self.server_id,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            finish_reason=self.finish_reason,
            version_spans=self.version_spans,
            latency_s=self.latency_s,
        )


class Client:
    """A live view of the `servers` topic, and sampling over it. `on_server` and `sample` must be
    called on one event loop's thread.
    """

    def __init__(
        self,
        pool: str = GENERATION,
        clock: Callable[[], float] = time.monotonic,
        api_key: str = "",
        heartbeat_s: float = 1.0,  # between two records of a server
        keeps_history: bool = False,  # `model.history: keep`
        offloader: Offloader | None = None,  # reads long answers
    ) -> None:
        self.registry = Registry(pool, heartbeat_s)
        self._clock = clock
        self._api_key = api_key
        self._keeps_history = keeps_history
        self._offloader = offloader or Offloader()
        # A connection of each request in flight takes a descriptor, and so does one kept idle.
        self._free = asyncio.Semaphore(max(1, descriptor_limit() // 3))
        self._connections: dict[str, ServerConnection] = {}  # by URL
        self._closing: set[asyncio.Task[None]] = set()
        self._asking: Counter[str] = Counter()  # requests in flight, by URL

    def on_server(self, server_id: str, server: Server | None, old: bool = False) -> None:
        """Apply a record of the `servers` topic. None: the server has left. `old`: the record was
        written before this process started.
        """
        self.registry.on_server(server_id, server, self._clock(), old)

    def servers(self) -> Mapping[str, Server]:
        """The last record of each server, of all pools."""
        return self.registry.servers

    def has_server(self) -> bool:
        """Whether a server of the pool is ready to be asked."""
        return self.registry.choose(self._clock()) is not None

    async def ready(self, n: int = 1, last: str = "") -> Server:
        """Wait for a server to ask for `n` completions, and log every REPORT_S what it waits for.
        Cancel it, or put a timeout around it.

        `last`: the server that gave the conversation's last answer.
        """
        reported = self._clock()
        while (server := self.registry.choose(self._clock(), n, last=last)) is None:
            await asyncio.sleep(REGISTRY_POLL_S)
            if self._clock() - reported > REPORT_S:
                reported = self._clock()
                logger.warning(
                    "waiting for a ready server of pool %r; known: %s",
                    self.registry.pool,
                    self._describe() or "none",
                )
        return server

    async def sample(
        self,
        messages: list[dict[str, Any]],
        n: int,
        env: EnvSettings,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: Prefix = NO_PREFIX,
        demonstration: Mapping[str, Any] | None = None,
    ) -> list[SampledCompletion]:
        """`n` answers to a conversation, from one server, another one if that fails.
        `tools`: as its chat template is told of them. `prefix`: what its prompt continues from.
        `demonstration`: a message of the assistant, which is then the only answer.

        Waits for a first server as long as it takes; from then on ends within attempts x 2 x
        timeout_s. Raises SamplingFailed: the request cannot be served (ContextFull: a prompt longer
        than the context), or `env.attempts` servers did not answer within `env.timeout_s` each
        (SamplingTimeout).
        """
        conversation = self._conversation(messages, env, tools, prefix, demonstration)
        failed: list[str] = []
        late = 0
        causes: list[str] = []
        server = await self.ready(n, last=prefix.server)
        while True:
            try:
                return await self._ask(server, conversation, n, env)
            except ServerFailed as error:
                late += isinstance(error, ServerTimeout)
                logger.warning("%s: %s", server.server_id, error)
                failed.append(server.server_id)
                causes.append(f"{server.server_id}: {error}")
                self.registry.mark_failed(server.server_id)
            if len(failed) >= env.attempts:
                kind = SamplingTimeout if late == len(failed) else SamplingFailed
                raise kind(f"{len(failed)} attempts failed; " + "; ".join(causes))
            try:
                async with asyncio.timeout(env.timeout_s):
                    server = self.registry.choose(self._clock(), n, failed) or await self.ready(n)
            except TimeoutError:
                raise SamplingFailed(
                    f"no server became ready within {env.timeout_s:g} s; " + "; ".join(causes)
                ) from None

    async def count_prompt_tokens(
        self,
        messages: list[dict[str, Any]],
        env: EnvSettings,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: Prefix = NO_PREFIX,
    ) -> int:
        """The number of tokens of the prompt that `sample` would make. Raises SamplingFailed."""
        conversation = self._conversation(messages, env, tools, prefix)
        try:
            async with asyncio.timeout(env.timeout_s):
                server = await self.ready(last=prefix.server)
                connection = self._connection(server.url)
                tokens, _ = await make_prompt(
                    connection, server.model, conversation, env.max_tokens
                )
                return len(tokens)
        except TimeoutError:
            raise SamplingTimeout(f"no server answered within {env.timeout_s:g} s") from None
        except ServerRejected as error:
            kind = ContextFull if CONTEXT in str(error) else SamplingRejected
            raise kind(f"the server refuses the request: {error}") from None
        except (RequestFailed, *UNUSABLE) as error:
            raise SamplingFailed(f"the server did not count: {error}") from None

    def _conversation(
        self,
        messages: list[dict[str, Any]],
        env: EnvSettings,
        tools: Sequence[Mapping[str, Any]],
        prefix: Prefix,
        demonstration: Mapping[str, Any] | None = None,
    ) -> Conversation:
        return Conversation(
            messages=messages,
            prefix=prefix if self._keeps_history else replace(prefix, new_messages=0),
            tools=tools,
            variables=env.chat_template_kwargs,
            demonstration=demonstration,
        )

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def _ask(
        self, server: Server, conversation: Conversation, n: int, env: EnvSettings
    ) -> list[SampledCompletion]:
        """Ask one server. What waits for a free descriptor does not count as the server's time."""
        async with self._free:
            return await self._ask_now(server, conversation, n, env)

    async def _ask_now(
        self, server: Server, conversation: Conversation, n: int, env: EnvSettings
    ) -> list[SampledCompletion]:
        started = time.monotonic()
        self.registry.acquire(server.server_id, n)
        self._asking[server.url] += 1
        try:
            async with asyncio.timeout(env.timeout_s):
                connection = self._connection(server.url)
                tokens, kept = await make_prompt(
                    connection, server.model, conversation, env.max_tokens
                )
                given: list[int] = []
                if conversation.demonstration is not None:
                    given = await demonstrated_tokens(connection, server.model, conversation)
                if 0 < server.max_model_len <= len(tokens) + len(given):
                    raise ContextFull(
                        f"{server.server_id}: a prompt of {len(tokens)} tokens leaves no room in a"
                        f" context of {server.max_model_len}"
                    )
                if given:
                    shown = await score_demonstration(connection, server.model, tokens, given)
                    latency_s = time.monotonic() - started
                    return [_completion_of_demonstration(server, tokens, kept, shown, latency_s)]
                choices = await self._generate(server, tokens, n, env)
            latency_s = time.monotonic() - started
            return await self._offloader.run(
                server.url,
                CHOICE_TOKEN_BYTES * sum(len(choice.token_ids) for choice in choices),
                lambda: [
                    _completion_of_choice(server, tokens, kept, choice, env, latency_s)
                    for choice in choices
                ],
            )
        except TimeoutError:
            raise ServerTimeout(f"no answer within {env.timeout_s:g} s") from None
        except ServerRejected as error:
            kind = ContextFull if CONTEXT in str(error) else SamplingRejected
            raise kind(f"{server.server_id} refuses the request: {error}") from None
        except UnusableDemonstration as error:
            raise SamplingRejected(f"{server.server_id}: {error}") from None
        except RequestFailed as error:
            raise ServerFailed(str(error)) from None
        except UNUSABLE as error:  # a proxy's answer, or a server's of another version
            raise ServerFailed(
                f"an answer that cannot be used ({type(error).__name__}: {error})"
            ) from None
        finally:
            self.registry.release(server.server_id, n)
            self._asking[server.url] -= 1

    async def _generate(
        self, server: Server, tokens: list[int], n: int, env: EnvSettings
    ) -> list[GeneratedChoice]:
        """What the server has sampled, in answers of at most ANSWER_TOKENS or of one choice."""
        most = max(1, ANSWER_TOKENS // env.max_tokens)
        asked = [
            asyncio.create_task(self._generate_answer(server, tokens, min(most, n - first), env))
            for first in range(0, n, most)
        ]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            for answer in asked:
                answer.cancel()
        return [choice for choices in answers for choice in choices]

    async def _generate_answer(
        self, server: Server, tokens: list[int], n: int, env: EnvSettings
    ) -> list[GeneratedChoice]:
        """One answer of the server. All sampling parameters are sent: a default is the server's,
        and may be another model's.
        """
        top_p, top_k = truncation(env)
        sampling = {
            "n": n,
            "temperature": env.temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            # fewer where the context ends first: finish reason "length"
            "max_tokens": env.max_tokens,
            "logprobs": 0,  # of the sampled token alone
            "skip_special_tokens": False,
        }
        body = {
            "model": server.model,
            "token_ids": tokens,
            "sampling_params": sampling,
            "output_mode": "text",
        }
        answer = await self._connection(server.url).post(
            "/inference/v1/generate", body, GenerateResponse, n * env.max_tokens
        )
        if len(answer.choices) != n:
            raise ValueError(f"{len(answer.choices)} choices, where {n} were asked for")
        return answer.choices

    def _connection(self, url: str) -> ServerConnection:
        if url not in self._connections:
            self._close_unused_connections()
            self._connections[url] = ServerConnection(url, self._api_key, self._offloader)
        return self._connections[url]

    def _close_unused_connections(self) -> None:
        """Close connections to servers that have left. A server that restarts has another port."""
        known = {server.url for server in self.servers().values()}
        for url in [url for url in self._connections if url not in known and not self._asking[url]]:
            closing = asyncio.create_task(self._connections.pop(url).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            del self._asking[url]

    def _describe(self) -> str:
        now = self._clock()
        known = [s for s in self.servers().values() if s.pool == self.registry.pool]
        ages = {s.server_id: self.registry.age(s.server_id, now) for s in known}
        heard = {
            name: (
                f"heard of {age:.0f} s ago"
                if age < math.inf
                else "not heard of since this process began"
            )
            for name, age in ages.items()
        }
        return "; ".join(
            f"{s.server_id} {s.state} {s.error}".strip() + f", {heard[s.server_id]}" for s in known
        )


def apply_server_event(
    event: Event, clients: Iterable[Client], began: Mapping[TopicPartition, int]
) -> None:
    """Apply an event of the `servers` topic to these clients. One that cannot be read is
    skipped. `began`: where the topic ended when this process began.
    """
    if event.record is None or isinstance(event.record, Server):
        is_old = event.offset < began.get((event.topic, event.partition), 0)
        for client in clients:
            client.on_server(event.key, event.record, is_old)


def make_client(run: RunFile, pool: str, offloader: Offloader | None = None) -> Client:
    """The client for the servers of a pool of the run. A conversation stays with its server.
    `offloader`: that of the event loop, where it has one.
    """
    return Client(
        pool,
        api_key=resolve_reference(run.inference.api_key, "inference.api_key"),
        heartbeat_s=run.inference.heartbeat_s,
        keeps_history=run.model.history == "keep",
        offloader=offloader,
    )


def _completion_of_choice(
    server: Server,
    prompt: list[int],
    kept: int,
    choice: GeneratedChoice,
    env: EnvSettings,
    latency_s: float,
) -> SampledCompletion:
    """One choice of the answer. Raises ValueError when it is not complete.

    That is where the server has cut it off, or the versions do not tile it.
    """
    tokens = choice.token_ids
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    spans = [
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in choice.weight_versions
    ]
    if choice.finish_reason not in ("stop", "length") or not tokens:
        raise ValueError(f"finish reason {choice.finish_reason!r} after {len(tokens)} tokens")
    if len(logprobs) != len(tokens) or [s.start for s in spans] + [len(tokens)] != [0] + [
        s.end for s in spans
    ]:
        raise ValueError(
            f"{len(tokens)} tokens with {len(logprobs)} logprobs and version spans"
            f" {choice.weight_versions}"
        )
    dtype = token_dtype(max(*prompt, *tokens) + 1)
    top_p, top_k = truncation(env)
    return SampledCompletion(
        server_id=server.server_id,
        prompt_tokens=np.array(prompt, dtype),
        tokens=np.array(tokens, dtype),
        logprobs=np.array(logprobs, np.float32),
        text=choice.text,
        finish_reason=choice.finish_reason,
        version_spans=spans,
        latency_s=latency_s,
        temperature=env.temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=env.max_tokens,
        prefix_tokens=kept,
        routed_experts=experts_of(choice, len(prompt) + len(tokens)),
    )


def truncation(env: EnvSettings) -> tuple[float, int]:
    """`top_p` and `top_k`: 1 and -1, which are off, but in evaluations and of judges."""
    return (env.top_p, env.top_k) if isinstance(env, FreelySampled) else (1.0, -1)


def _completion_of_demonstration(
    server: Server, prompt: list[int], kept: int, shown: ScoredDemonstration, latency_s: float
) -> SampledCompletion:
    """A demonstrated answer. Nothing of the env's sampling applies to it."""
    count = len(shown.tokens)
    dtype = token_dtype(max(*prompt, *shown.tokens) + 1)
    return SampledCompletion(
        server_id=server.server_id,
        prompt_tokens=np.array(prompt, dtype),
        tokens=np.array(shown.tokens, dtype),
        logprobs=np.array(shown.logprobs, np.float32),
        text=shown.text,
        finish_reason="stop",
        version_spans=[VersionSpan(version=shown.version, start=0, end=count)],
        latency_s=latency_s,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=count,
        prefix_tokens=kept,
    )
