"""Environments of the library verifiers (Prime Intellect), as they are: `kind: verifiers:MODULE`,
whose `load_environment` gets the `params`.

The library runs its own loop, tools and rubric. Only the model is ours: a client that hands each
conversation to `led.py`, so ids, logprobs and versions are those of the tokens that were sampled,
and what was said is not tokenised again. The reward is the rubric's; each of its functions is a
named reward beside it, which counts nothing by itself.
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
    Ask,
    Earned,
    Judged,
    Message,
    Problem,
    Truncated,
    constructed,
    load,
    one_line,
)
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.engine.turns import in_thread, is_coroutine
from streamrl.envs.shipped import tools
from streamrl.envs.shipped.tools import Call
from streamrl.errors import ConfigError
from streamrl.inference.client import ContextFull, Sampled

RUBRIC = "rubric"  # the named reward that trains: what the rubric makes of its functions
ENTRY = "load_environment"

Syntax = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[Call]]]
"""What was said beside calls of tools, and the calls: of what was said, and the tools (OpenAI
functions) that there are.
"""


class Verifiers:
    """An env that leads (`base.Leads`). Problems are the rows of its training set, each epoch in
    another order.
    """

    def __init__(
        self,
        module: str,
        seed: int,
        params: Mapping[str, Any],
        where: str,
        tool_syntax: str = "json",
    ) -> None:
        self._syntax: Syntax = SYNTAXES.get(tool_syntax) or import_path(
            tool_syntax, f"{where}.tool_syntax", SYNTAXES
        )
        self.env = loaded(module, params, where)
        try:
            self._rows: Any = self.env.get_dataset()
        except ValueError as error:
            raise ConfigError(f"{where}: {module} has no training set ({error})") from None
        if not len(self._rows):
            raise ConfigError(f"{where}: the training set of {module} is empty")
        self._epochs = EpochOrder(seed, len(self._rows))

    def dataset_index(self, index: int) -> DatasetIndex:
        return self._epochs(index)

    def problem(self, index: int) -> Problem:
        row = self._rows[self.dataset_index(index).problem]
        prompt = row["prompt"]
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [_plain(message) for message in prompt]
        )
        described = [_function(tool) for tool in self.env.tool_defs or ()]
        return Problem(messages, row, {"example_id": row["example_id"]}, described)

    async def converse(self, problem: Problem, ask: Ask, notes: dict[str, Any]) -> None:
        policy = Policy(ask, self._syntax, notes)
        notes["state"] = state = await self.env.rollout(problem.answer, policy, "policy", {})
        if state.get("timed_out"):
            raise Truncated("time", "the env's own")
        if state.get("error") is not None:
            raise Truncated("tool-error", one_line(state["error"]))

    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> list[Judged | Exception]:
        states = [noted["state"] for noted in notes]
        rubric = self.env.rubric
        failures: dict[int, Exception] = {}  # by id of the state
        for part in rubrics(rubric):
            tell_failures(part, failures)
        await (
            rubric.score_group(states)
            if self.env.score_rollouts
            else rubric.dummy_score_group(states)
        )
        for state in states:
            await rubric.cleanup(state)
        return [
            failures.get(id(state)) or earned(state["reward"], state["metrics"] or {})
            for state in states
        ]


class Said(NamedTuple):
    """An answer, as the library is told of it."""

    sampled: Sampled
    content: str
    calls: list[Any]  # ToolCall


class Policy(vf.OpenAIChatCompletionsClient):
    """The policy of one rollout, in the place of an OpenAI client."""

    def __init__(self, ask: Ask, syntax: Syntax, notes: dict[str, Any]) -> None:
        super().__init__(ask)  # type: ignore[arg-type]  # its own methods that would use it are all below
        self._ask, self._syntax, self._notes = ask, syntax, notes
        # by the id of its first call: a message, and how it was said
        self._written: dict[str, tuple[Message, str]] = {}

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """OpenAI messages. A call of a tool is the text that it was said as, unless the env has
        changed it.
        """
        native, more = await super().to_native_prompt(messages)
        return [self._as_said(_plain(message)) for message in native], more

    async def to_native_tool(self, tool: Any) -> Any:
        return _function(tool)

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
    ) -> Any:
        """The run file says how to sample. `more`: the library hands over the state of the rollout
        with each turn.
        """
        if "state" in more:
            self._notes["state"] = more["state"]
        try:
            sampled = await self._ask(prompt, tools or [])
        except ContextFull as error:
            raise vf.errors.OverlongPromptError(str(error)) from error
        content, calls = self._syntax(sampled.text, tools or [])
        # a server makes text of a call that it cannot read
        if not calls or any(call.error for call in calls):
            return Said(sampled, sampled.text, [])
        first = len(self._written)
        called = [
            vf.types.ToolCall(
                id=f"call-{first}-{i}", name=call.name, arguments=json.dumps(call.arguments)
            )
            for i, call in enumerate(calls)
        ]
        functions = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in called
        ]
        self._written[called[0].id] = (
            {"role": "assistant", "content": content, "tool_calls": functions},
            sampled.text,
        )
        return Said(sampled, content, called)

    async def raise_from_native_response(self, response: Any) -> None:
        """An answer that came is one, an empty one too."""

    async def from_native_response(self, response: Any) -> Any:
        sampled, content, calls = response
        asked, said = sampled.prompt_tokens.tolist(), sampled.tokens.tolist()
        cut = sampled.finish_reason == "length"
        message = vf.types.ResponseMessage(
            content=content,
            tool_calls=calls or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
            tokens=vf.types.ResponseTokens(
                prompt_ids=asked,
                prompt_mask=[0] * len(asked),
                completion_ids=said,
                completion_mask=[1] * len(said),
                completion_logprobs=sampled.logprobs.tolist(),
            ),
        )
        usage = vf.types.Usage(
            prompt_tokens=len(asked),
            reasoning_tokens=0,
            completion_tokens=len(said),
            total_tokens=len(asked) + len(said),
        )
        return vf.types.Response(
            id=sampled.server_id,
            created=int(time.time()),
            model="policy",
            usage=usage,
            message=message,
        )

    async def close(self) -> None:
        """The connections are the env process's."""

    def _as_said(self, message: Message) -> Message:
        for call in message.get("tool_calls", ())[:1]:
            written, text = self._written.get(call["id"], ({}, ""))
            if written == message:
                return {"role": "assistant", "content": text}
        return message


def loaded(module: str, params: Mapping[str, Any], where: str) -> Any:
    """The environment that MODULE or FILE.py makes, as the library's own `load_environment` would.
    Raises ConfigError.
    """
    path = module if module.endswith(".py") else module.replace("-", "_").rpartition("/")[2]
    with _own_signals():
        entry = load(f"{path}:{ENTRY}", where, "env", {})
        if not callable(entry):
            raise ConfigError(
                f"{where}: {path} has no {ENTRY}; an environment of verifiers is a module with one"
            )
        made = constructed(entry, f"verifiers:{module}", params, where)
    if not isinstance(made, vf.Environment):
        raise ConfigError(
            f"{where}: {ENTRY} of {path} gives no verifiers.Environment but {type(made).__name__}"
        )
    made.env_id, made.env_args = made.env_id or module, made.env_args or dict(params)
    logging.getLogger("verifiers").propagate = True  # what it has to say belongs into the env's log
    return made


def rubrics(rubric: Any) -> Iterator[Any]:
    """The rubrics that a group consists of; or the one."""
    parts = getattr(rubric, "rubrics", None)
    if parts is None:
        yield rubric
    for part in parts or ():
        yield from rubrics(part)


def tell_failures(rubric: Any, failures: dict[int, Exception]) -> None:
    """From now on note what its functions raise, under the id of the state: the library counts 0
    for it.

    Functions that are no coroutines are called in threads, so that one that takes its time does not
    stop the others.
    """
    call_one, call_all = (
        type(rubric)._call_individual_reward_func,
        type(rubric)._call_group_reward_func,
    )  # pyright: ignore[reportPrivateUsage]

    def noting(
        function: Callable[..., Any], states: Sequence[Any], number: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        async def checked(**given: Any) -> Any:
            try:
                found = (
                    await function(**given)
                    if is_coroutine(function)
                    else await in_thread(function, **given)
                )
                return number(await found if inspect.isawaitable(found) else found)
            except Exception as error:
                for state in states:
                    failures.setdefault(
                        id(state),
                        RuntimeError(f"reward function {function.__name__}: {one_line(error)}"),
                    )
                raise

        return checked

    async def one(function: Any, state: Any) -> float:
        return await call_one(rubric, noting(function, [state], float), state)

    async def all_of(function: Any, states: Sequence[Any]) -> list[float]:
        def numbers(found: Any) -> list[float]:
            values = [float(value) for value in found]
            if len(values) != len(states):
                raise ValueError(f"{len(values)} numbers for {len(states)} rollouts")
            return values

        return await call_all(rubric, noting(function, states, numbers), states)

    rubric._call_individual_reward_func, rubric._call_group_reward_func = one, all_of


def earned(reward: float, functions: Mapping[str, float]) -> Earned:
    """What the rubric says, and each of its functions beside it, which counts where the run file
    gives it a weight.
    """
    if RUBRIC in functions:
        raise ValueError(
            f"a reward function is called {RUBRIC!r}, as what the rubric makes of all of them is; give it another name"
        )
    beside = {name: float(value) for name, value in functions.items()}
    return Earned({RUBRIC: float(reward), **beside}, weights=dict.fromkeys(beside, 0.0))


def in_json(text: str, functions: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, as Qwen and
    Hermes write it.
    """
    found = tools.calls(text, "json", "", "") if functions else []
    return (text.partition("<tool_call>")[0], found) if found else (text, [])


def in_brackets(text: str, functions: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """`[3*4]`, all that was said: the first argument of the first tool."""
    if not functions:
        return text, []
    first = functions[0]["function"]
    argument = next(iter(first["parameters"].get("properties", {})), "")
    found = tools.calls(text, "brackets", first["name"], argument)
    return ("", found) if found else (text, [])


SYNTAXES: dict[str, Syntax] = {"json": in_json, "brackets": in_brackets}


def _function(tool: Any) -> dict[str, Any]:
    """A tool of the library as an OpenAI function."""
    strict = {} if tool.strict is None else {"strict": tool.strict}
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            **strict,
        },
    }


def _plain(message: Mapping[str, Any]) -> Message:
    """Without what is not there: a table of messages has every column for each of them."""
    return {
        name: value for name, value in message.items() if value is not None or name == "content"
    }


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Making an environment of verifiers takes over the process's signals; how a part ends is its
    own matter.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
