"""Runs environments of the library verifiers (Prime Intellect) as they are.

The run file names one as `kind: verifiers:MODULE`. Its `load_environment` gets the `params`.

The library runs its own loop, tools and rubric. Only the model is ours: a client that hands each
conversation to the rollout's session (`engine/session.py`). Ids, logprobs and versions are
therefore those of the tokens that were sampled, and what was said is not tokenised again. The
reward is the rubric's. Each function of the rubric is a named reward beside it, which counts
nothing by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import verifiers as vf

from streamrl.config.plugins import import_path
from streamrl.envs.api import (
    AgentLoopEnv,
    Message,
    PolicyClient,
    Problem,
    RewardBreakdown,
    RewardResult,
    Tool,
    Truncated,
)
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.engine.time_limits import in_thread, is_coroutine
from streamrl.envs.loading import construct, load
from streamrl.errors import ConfigError, describe_error
from streamrl.inference.client import ContextFull, SampledCompletion
from streamrl.sessions.tool_calls import ToolCall, function_tool, parse_calls

RUBRIC = "rubric"  # the named reward that trains: what the rubric makes of its functions
ENTRY = "load_environment"

ToolSyntax = Callable[[str, Sequence[Tool]], tuple[str, list[ToolCall]]]
"""Reads calls of tools: from what was said, and the tools that there are, to what was said besides
the calls, and the calls.
"""


class Verifiers(AgentLoopEnv):
    """An env that is an environment of the library. Its problems are the rows of the training set,
    each epoch in another order.
    """

    def __init__(
        self,
        module: str,
        seed: int,
        params: Mapping[str, Any],
        where: str,
        tool_syntax: str = "json",
    ) -> None:
        self._syntax: ToolSyntax = SYNTAXES.get(tool_syntax) or import_path(
            tool_syntax, f"{where}.tool_syntax", SYNTAXES
        )
        self.env = load_environment(module, params, where)
        try:
            self._rows: Any = self.env.get_dataset()
        except ValueError as error:
            raise ConfigError(f"{where}: {module} has no training set ({error})") from None
        if not len(self._rows):
            raise ConfigError(f"{where}: the training set of {module} is empty")
        self._order = EpochOrder(seed, len(self._rows))

    def dataset_index(self, number: int) -> DatasetIndex:
        return self._order(number)

    def problem(self, number: int) -> Problem:
        row = self._rows[self.dataset_index(number).problem]
        prompt = row["prompt"]
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = [_without_missing(message) for message in prompt]
        return Problem(
            messages=messages,
            answer=row,
            metadata={"example_id": row["example_id"]},
            tools=[_function_tool(tool) for tool in self.env.tool_defs or ()],
        )

    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        policy = Policy(ask, self._syntax, notes)
        state = await self.env.rollout(problem.answer, policy, "policy", {})
        notes["state"] = state
        if state.get("timed_out"):
            raise Truncated("time", "the env's own")
        if state.get("error") is not None:
            raise Truncated("tool-error", describe_error(state["error"]))

    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> list[RewardResult | Exception]:
        states = [noted["state"] for noted in notes]
        rubric = self.env.rubric
        failures: dict[int, Exception] = {}  # by the id of the state
        for part in rubrics(rubric):
            record_failures(part, failures)
        if self.env.score_rollouts:
            await rubric.score_group(states)
        else:
            await rubric.dummy_score_group(states)
        for state in states:
            await rubric.cleanup(state)
        results: list[RewardResult | Exception] = []
        for state in states:
            failure = failures.get(id(state))
            results.append(failure or breakdown(state["reward"], state["metrics"] or {}))
        return results


class PolicyAnswer(NamedTuple):
    """An answer of the policy, in the words of the library."""

    sampled: SampledCompletion
    content: str
    calls: list[Any]  # vf.types.ToolCall


class Policy(vf.OpenAIChatCompletionsClient):
    """The policy of one rollout, where the library expects an OpenAI client."""

    def __init__(self, ask: PolicyClient, syntax: ToolSyntax, notes: dict[str, Any]) -> None:
        # the methods of the library's that would use it are all overridden below
        super().__init__(ask)  # type: ignore[arg-type]
        self._ask = ask
        self._syntax = syntax
        self._notes = notes
        # By the id of its first call: a message with calls, and the text that the policy said.
        self._written: dict[str, tuple[Message, str]] = {}

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """The conversation as OpenAI messages. A message with calls is the text that the policy
        said, unless the env has changed it.
        """
        native, more = await super().to_native_prompt(messages)
        return [self._as_said(_without_missing(message)) for message in native], more

    async def to_native_tool(self, tool: Any) -> Any:
        return _function_tool(tool)

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
    ) -> Any:
        """Ask the policy. It samples as the run file says, not as `sampling_args` do. The library
        hands over the state of the rollout in `more`.
        """
        if "state" in more:
            self._notes["state"] = more["state"]
        try:
            sampled = await self._ask(prompt, tools or [])
        except ContextFull as error:
            raise vf.errors.OverlongPromptError(str(error)) from error
        content, calls = self._syntax(sampled.text, tools or [])
        # a call that cannot be read stays text, as a server would leave it
        if not calls or any(call.error for call in calls):
            return PolicyAnswer(sampled, sampled.text, [])
        return self._with_calls(sampled, content, calls)

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise nothing: every answer is valid, an empty one too."""

    async def from_native_response(self, response: Any) -> Any:
        sampled, content, calls = response
        prompt = sampled.prompt_tokens.tolist()
        completion = sampled.tokens.tolist()
        is_truncated = sampled.finish_reason == "length"
        finish_reason = "stop"
        if is_truncated:
            finish_reason = "length"
        elif calls:
            finish_reason = "tool_calls"
        tokens = vf.types.ResponseTokens(
            prompt_ids=prompt,
            prompt_mask=[0] * len(prompt),
            completion_ids=completion,
            completion_mask=[1] * len(completion),
            completion_logprobs=sampled.logprobs.tolist(),
        )
        message = vf.types.ResponseMessage(
            content=content,
            tool_calls=calls or None,
            finish_reason=finish_reason,
            is_truncated=is_truncated,
            tokens=tokens,
        )
        usage = vf.types.Usage(
            prompt_tokens=len(prompt),
            reasoning_tokens=0,
            completion_tokens=len(completion),
            total_tokens=len(prompt) + len(completion),
        )
        return vf.types.Response(
            id=sampled.server_id,
            created=int(time.time()),
            model="policy",
            usage=usage,
            message=message,
        )

    async def close(self) -> None:
        """Close nothing: the connections belong to the env's process, which closes them."""

    def _with_calls(
        self, sampled: SampledCompletion, content: str, calls: list[ToolCall]
    ) -> PolicyAnswer:
        """An answer that calls tools. The text of it is kept for the next prompt."""
        first = len(self._written)
        called: list[Any] = []
        functions: list[dict[str, Any]] = []
        for i, call in enumerate(calls):
            call_id = f"call-{first}-{i}"
            arguments = json.dumps(call.arguments)
            called.append(vf.types.ToolCall(id=call_id, name=call.name, arguments=arguments))
            function = {"name": call.name, "arguments": arguments}
            functions.append({"type": "function", "id": call_id, "function": function})
        message = {"role": "assistant", "content": content, "tool_calls": functions}
        self._written[called[0].id] = (message, sampled.text)
        return PolicyAnswer(sampled, content, called)

    def _as_said(self, message: Message) -> Message:
        calls = message.get("tool_calls", ())
        if calls and calls[0]["id"] in self._written:
            written, text = self._written[calls[0]["id"]]
            if written == message:
                return {"role": "assistant", "content": text}
        return message


def load_environment(module: str, params: Mapping[str, Any], where: str) -> Any:
    """The environment that MODULE or FILE.py makes, as the library's own `load_environment` would
    make it. Raises ConfigError.
    """
    path = module if module.endswith(".py") else module.replace("-", "_").rpartition("/")[2]
    with _own_signals():
        entry = load(f"{path}:{ENTRY}", where, "env")
        if not callable(entry):
            raise ConfigError(
                f"{where}: {path} has no {ENTRY}; an environment of verifiers is a module with one"
            )
        environment = construct(entry, f"verifiers:{module}", params, where)
    if not isinstance(environment, vf.Environment):
        given = type(environment).__name__
        raise ConfigError(f"{where}: {ENTRY} of {path} gives no verifiers.Environment but {given}")
    environment.env_id = environment.env_id or module
    environment.env_args = environment.env_args or dict(params)
    logging.getLogger("verifiers").propagate = True  # what it logs belongs into the env's log
    return environment


def rubrics(rubric: Any) -> Iterator[Any]:
    """The rubrics that a group of rubrics consists of; or the single one."""
    parts = getattr(rubric, "rubrics", None)
    if parts is None:
        yield rubric
    for part in parts or ():
        yield from rubrics(part)


def record_failures(rubric: Any, failures: dict[int, Exception]) -> None:
    """Note from now on what the functions of a rubric raise, by the id of the state. The library
    itself counts 0 for a function that raises.

    Functions that are no coroutines are called in threads, so that one that takes its time does not
    stop the others.
    """
    call_one = type(rubric)._call_individual_reward_func  # pyright: ignore[reportPrivateUsage]
    call_all = type(rubric)._call_group_reward_func  # pyright: ignore[reportPrivateUsage]

    def noting(
        function: Callable[..., Any], states: Sequence[Any], number: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        async def checked(**given: Any) -> Any:
            try:
                if is_coroutine(function):
                    result = await function(**given)
                else:
                    result = await in_thread(function, **given)
                return number(await result if inspect.isawaitable(result) else result)
            except Exception as error:
                cause = f"reward function {function.__name__}: {describe_error(error)}"
                for state in states:
                    failures.setdefault(id(state), RuntimeError(cause))
                raise

        return checked

    async def one(function: Any, state: Any) -> float:
        return await call_one(rubric, noting(function, [state], float), state)

    async def all_of(function: Any, states: Sequence[Any]) -> list[float]:
        def numbers(result: Any) -> list[float]:
            values = [float(value) for value in result]
            if len(values) != len(states):
                raise ValueError(f"{len(values)} numbers for {len(states)} rollouts")
            return values

        return await call_all(rubric, noting(function, states, numbers), states)

    rubric._call_individual_reward_func = one
    rubric._call_group_reward_func = all_of


def breakdown(reward: float, functions: Mapping[str, float]) -> RewardBreakdown:
    """The reward of the rubric, and each of its functions beside it. A function counts only if the
    run file gives it a weight.
    """
    if RUBRIC in functions:
        raise ValueError(
            f"a reward function is called {RUBRIC!r}, as what the rubric makes of all of them is; "
            "give it another name"
        )
    by_name = {name: float(value) for name, value in functions.items()}
    rewards = {RUBRIC: float(reward), **by_name}
    return RewardBreakdown(rewards, weights=dict.fromkeys(by_name, 0.0))


def in_json(text: str, functions: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """The syntax `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, as
    Qwen and Hermes write it.
    """
    calls = parse_calls(text, "json", functions)
    return (text.partition("<tool_call>")[0], calls) if calls else (text, [])


def in_brackets(text: str, functions: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """The syntax `[3*4]` and nothing else: the first argument of the first tool."""
    calls = parse_calls(text, "brackets", functions)
    return ("", calls) if calls else (text, [])


SYNTAXES: dict[str, ToolSyntax] = {"json": in_json, "brackets": in_brackets}


def _function_tool(tool: Any) -> dict[str, Any]:
    """A tool of the library as an OpenAI chat tool."""
    described = function_tool(tool.name, tool.description, tool.parameters)
    if tool.strict is not None:
        described["function"]["strict"] = tool.strict
    return described


def _without_missing(message: Mapping[str, Any]) -> Message:
    """The message without the columns that are None: a table of messages has every column for each
    of them.
    """
    return {
        name: value for name, value in message.items() if value is not None or name == "content"
    }


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the process's signal handlers: making an environment of verifiers replaces them, and how
    a part ends is its own matter.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
