"""What an env is: problems, and rewards for answers. Sampling, counting and publishing are done for
it (`process.py`).

class ReverseDigits:
    def __init__(self, seed: int, digits: int = 2): ...
    def problem(self, index: int) -> Problem: ...
    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]: ...

One that talks with the policy has a third method, which says what the world answers to what the
policy said:

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Sequence[Message] | None: ...

One that leads the conversation itself, as those of other libraries do, has `converse` and `judge`
instead (`Leads`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from streamrl.envs.dataset_order import DatasetIndex
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from streamrl.inference.client import Sampled

SHIPPED = {
    "copy-digits": "streamrl.envs.shipped.copy_digits:CopyDigits",
    "add-digits": "streamrl.envs.shipped.add_digits:AddDigits",
    "calculator": "streamrl.envs.shipped.calculator:Calculator",
    "guess-number": "streamrl.envs.shipped.guess_number:GuessNumber",
    "dataset": "streamrl.envs.shipped.dataset:Dataset",
    "multiple-choice": "streamrl.envs.shipped.multiple_choice:MultipleChoice",
    "coding": "streamrl.envs.shipped.coding:Coding",
    "reasoning-gym": "streamrl.envs.shipped.reasoning_gym:ReasoningGym",
}
VERIFIERS = "verifiers:"  # before MODULE or FILE.py: an env of that library
REWARDS = {"math-verify": "streamrl.envs.shipped.math_verify:MathVerify"}

Message = dict[str, Any]  # an OpenAI chat message: role, content


class Problem(NamedTuple):
    """One task, posed as a conversation that the policy is to answer."""

    messages: list[Message]
    answer: Any = None  # whatever `rewards` needs
    metadata: Mapping[str, Any] = {}  # published with the rollout: plain values
    # OpenAI function tools, for the chat template to tell of
    tools: Sequence[Mapping[str, Any]] = ()
    # the very prompt, in the policy's vocabulary; then `messages` are for people only. Of an env
    # without `reply`
    tokens: Sequence[int] = ()


class Said(NamedTuple):
    """What the policy said in one turn."""

    text: str  # special tokens are shown, but for the closing end of sequence
    tokens: np.ndarray  # (n,) unsigned: as sampled, the closing end of sequence among them


class Answer(NamedTuple):
    """What the policy said, in all."""

    text: str  # its last turn
    finished: bool  # it ended by itself; False: a limit cut it off
    said: Sequence[Said] = ()  # every turn of the policy
    messages: Sequence[Message] = ()  # the whole conversation
    truncation: str = ""  # which limit: length, turns, context, time, tool-time, tool-error


class Earned(NamedTuple):
    """Named rewards at three levels. A name's total over all of them is what its metric shows and
    its weight multiplies.
    """

    rollout: Mapping[str, float] = {}  # for all of it
    # one map a turn of the policy: for what was said up to its end
    turns: Sequence[Mapping[str, float]] = ()
    # one map a turn, one number a sampled token: for what was said up to it
    tokens: Sequence[Mapping[str, Sequence[float]]] = ()
    weights: Mapping[str, float] = {}  # of names, where the run file has none; otherwise 1


Judged = Mapping[str, float] | Earned


class Env(Protocol):
    """Endless problems, and what an answer is worth. Constructed with `seed` and the `params` of
    the run file.
    """

    def problem(self, index: int) -> Problem:
        """Problem number `index` >= 0: the same seed and index give the same problem, in any
        process.
        """
        ...

    def rewards(self, problem: Problem, answer: Answer) -> Judged | Awaitable[Judged]:
        """Named rewards of the rollout, or at several levels. Their sum, weighted by
        `reward_weights` of the run file, is the scalar that trains.

        Called in a thread of its own, several at a time, unless it is `async`. What it raises, or
        takes longer than `env_timeout_s` for, is a failed rollout.
        """
        ...


class Finite(Env, Protocol):
    """An env that poses the same problems again: it says which, so that they can be filtered by
    pass rate.
    """

    def dataset_index(self, index: int) -> DatasetIndex | None:
        """Which of its problems number `index` poses, and in which epoch: each once an epoch
        (`epochs.py`). None: it poses none twice.
        """
        ...


class Replies(Env, Protocol):
    """An env that talks with the policy."""

    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """What follows the policy's last message: results of tools, a user's next turn. None, or
        nothing: the conversation is over.

        Called in a thread of its own, several at a time, unless it is `async`. What it raises ends
        the rollout, truncated.
        """
        ...


class Ask(Protocol):
    """The policy, as one rollout of an env that leads has it."""

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Sampled:
        """What it says to this conversation, on from the very tokens it has seen and said before
        where that is how the conversation goes on.

        Raises SamplingFailed, ContextFull among it, when there is no answer: because none can be
        had, or a limit of the run file is reached.
        """
        ...


class Truncated(Exception):
    """Raised in `converse`: a limit of the env's own has ended the rollout. `limit`: as
    `Answer.truncation`.
    """

    def __init__(self, limit: str, note: str = "") -> None:
        super().__init__(note)
        self.limit, self.note = limit, note


class Leads(Protocol):
    """An env that leads the conversation itself: it asks the policy as often as it likes, and
    judges the rollouts of a problem together.
    """

    def problem(self, index: int) -> Problem:
        """As an `Env`'s. A rollout that first asks exactly `messages` and `tools` shares one
        request with the others that do.
        """
        ...

    async def converse(self, problem: Problem, ask: Ask, notes: dict[str, Any]) -> None:
        """One rollout. It may be cancelled (`rollout_timeout_s`); what it raises ends the rollout,
        truncated. `notes`: what `judge` needs of it.
        """
        ...

    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> Sequence[Judged | Exception]:
        """What each of the rollouts has earned, by their notes, or why that cannot be said; those
        of which there is nothing to judge are not here.
        """
        ...


Reward = Callable[
    [Problem, Answer, Mapping[str, float]], float | Judged | Awaitable[float | Judged]
]
"""A reward function of the run file: problem, answer, and the totals earned so far by name, the
env's own first. A number goes by the name that the function has there.
"""


def make(
    kind: str, seed: int, params: Mapping[str, Any], where: str, tool_syntax: str = "json"
) -> Env | Leads:
    """The env of that kind: a shipped name, FILE.py:CLASS, MODULE:CLASS, verifiers:FILE.py or
    verifiers:MODULE. `where` names it in a ConfigError.
    """
    if kind.startswith(VERIFIERS):
        try:
            from streamrl.envs.shipped.verifiers import Verifiers  # takes seconds
        except Exception as error:
            # one of its libraries raises a RuntimeError beside what it does not like
            raise ConfigError(
                f"{where}: {kind} needs the library verifiers, as streamrl[envs] installs it ({one_line(error)})"
            ) from error
        return Verifiers(kind.removeprefix(VERIFIERS), seed, params, where, tool_syntax)
    return cast(Env, constructed(env_class(kind, where), kind, params, where, seed=seed))


def make_reward(kind: str, params: Mapping[str, Any], where: str) -> Reward:
    """The reward function of that kind: a shipped name, FILE.py:NAME or MODULE:NAME; of a class, an
    instance with `params`. Raises ConfigError.
    """
    found = load(kind, where, "reward", REWARDS)
    if inspect.isclass(found):
        found = constructed(found, kind, params, where)
    elif params:
        raise ConfigError(
            f"{where}.params: {kind} is a function and takes none; make it a class with __init__(self, ...) and __call__"
        )
    if not callable(found):
        raise ConfigError(
            f"{where}: {kind} is no function; a reward is called with (problem, answer, earned)"
        )
    return cast(Reward, found)


def constructed(found: Any, kind: str, params: Mapping[str, Any], where: str, **given: Any) -> Any:
    """An instance with `params` of the run file and what is given. Raises ConfigError for a
    parameter that it does not take, or refuses.
    """
    parameters = inspect.signature(found).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = [
        parameter.name
        for parameter in parameters
        if parameter.name not in given and parameter.kind is not parameter.VAR_KEYWORD
    ]
    for name in params:
        if name not in accepted and not takes_any:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"it takes {', '.join(accepted) or 'none'}"
            )
            raise ConfigError(f"{where}.params: {kind} takes no {name!r}; {hint}")
    try:
        return found(**given, **params)
    except Exception as error:
        # it is somebody else's code; many check their settings with `assert`
        raise ConfigError(f"{where}.params: {kind} refuses them: {one_line(error)}") from error


def env_class(kind: str, where: str) -> Any:
    found = load(kind, where, "env", SHIPPED)
    path, _, name = SHIPPED.get(kind, kind).rpartition(":")
    if not inspect.isclass(found):
        raise ConfigError(f"{where}: {path} has no class {name!r}")
    needed = (
        ("problem", "converse", "judge") if hasattr(found, "converse") else ("problem", "rewards")
    )
    if missing := [method for method in needed if not callable(getattr(found, method, None))]:
        raise ConfigError(
            f"{where}: class {name!r} of {path} has no method {missing[0]!r}; an env has problem(index) and rewards(problem, answer)"
        )
    return found


def load(kind: str, where: str, what: str, shipped: Mapping[str, str]) -> Any:
    """What a shipped name, FILE.py:NAME or MODULE:NAME stands for; None where the file or module
    has no such name. Raises ConfigError.
    """
    path, colon, name = shipped.get(kind, kind).rpartition(":")
    if not colon:
        near = difflib.get_close_matches(kind, shipped, 1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"your own: FILE.py:{'CLASS or MODULE:CLASS' if what == 'env' else 'NAME or MODULE:NAME'}"
        )
        raise ConfigError(
            f"{where}: {what} {kind!r} not found; shipped are {', '.join(shipped)}; {hint}"
        )
    try:
        module = _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{where}: {what} {kind!r} cannot be loaded ({error}); is the path right, seen from where streamrl was started?"
        ) from error
    except Exception as error:  # whatever its own code raises
        raise ConfigError(
            f"{where}: {what} {kind!r} cannot be loaded, {path} fails with {one_line(error)}"
        ) from error
    return getattr(module, name, None)


def one_line(error: Exception) -> str:
    """What somebody else's code raised, for a log or a record."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    # hides no other module
    spec = importlib.util.spec_from_file_location(f"env_from_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
