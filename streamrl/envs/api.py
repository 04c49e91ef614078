"""What the author of an env imports: problems, completions, rewards, and the kinds of env.

    class ReverseDigits(SingleTurnEnv):
        def __init__(self, seed: int, digits: int = 2) -> None: ...
        def problem(self, number: int) -> Problem: ...
        def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]: ...

An env derives from the class for the way in which it talks with the policy:

- `SingleTurnEnv` asks once and gives rewards for the completion.
- `MultiTurnEnv` also has `reply`: what the world answers to the policy's completion.
- `AgentLoopEnv` asks the policy as often as it likes (`converse`), and gives the rewards of a group
  together (`judge`). Environments of other libraries are of this kind.

An env is constructed with its `seed` and the `params` of the run file. Sampling, limits, counting
and publishing are done for it (`process.py`). docs/add-an-env.md shows how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from streamrl.envs.dataset_order import DatasetIndex
from streamrl.envs.sessions.rewards import RewardBreakdown as RewardBreakdown

if TYPE_CHECKING:
    from streamrl.inference.clients.client import SampledCompletion

Message = dict[str, Any]
"""An OpenAI chat message, with `role` and `content`."""

Tool = Mapping[str, Any]
"""A tool that the policy may call, described as an OpenAI function."""


class Problem(NamedTuple):
    """One task, posed as a conversation that the policy is to answer."""

    messages: list[Message]
    answer: Any = None  # whatever `rewards` needs
    metadata: Mapping[str, Any] = {}  # plain values, published with each rollout
    tools: Sequence[Tool] = ()  # shown to the policy by the chat template
    # The exact prompt in the policy's vocabulary. `messages` are then only for people to read.
    # Only a SingleTurnEnv may pose a problem in tokens.
    tokens: Sequence[int] = ()


class PolicyTurn(NamedTuple):
    """The policy's answer in one turn."""

    text: str  # without the closing end-of-sequence token; other special tokens are shown
    tokens: np.ndarray  # (n,) unsigned: as sampled, the closing end-of-sequence token included


class Completion(NamedTuple):
    """All answers of the policy to a problem."""

    text: str  # its last turn
    finished: bool  # True if it ended by itself, False if a limit cut it off
    turns: Sequence[PolicyTurn] = ()  # every turn of the policy
    messages: Sequence[Message] = ()  # the whole conversation
    truncation: str = ""  # the limit: length, turns, context, time, tool-time or tool-error


RewardResult = Mapping[str, float] | RewardBreakdown
"""What `rewards` returns: named rewards of the whole rollout, or of several levels."""

RewardFunction = Callable[
    [Problem, Completion, Mapping[str, float]],
    float | RewardResult | Awaitable[float | RewardResult],
]
"""A reward function of the run file.

It is called with the problem, the completion, and the totals of the rewards so far by name, those
of the env first. A number that it returns goes by the name that the function has in the run file.
"""


class BaseEnv(ABC):
    """What all kinds of env have in common. An env derives from one of the kinds below."""

    @abstractmethod
    def problem(self, number: int, /) -> Problem:
        """The problem of that number, which is 0 or more. The same seed and number give the same
        problem in every process.
        """

    def dataset_index(self, number: int, /) -> DatasetIndex | None:
        """The problem of a finite set that `number` poses, and its epoch; each problem is
        posed once an epoch (`dataset_order.py`).

        None means that the env poses no problem twice. Problems of an env that has such a set can
        be filtered by their pass rate.
        """
        return None

    async def close(self) -> None:  # noqa: B027  # not every env has something to close
        """End the processes and connections of the env. Called once, at the end."""


class SingleTurnEnv(BaseEnv):
    """An env that asks once and gives rewards for the policy's answer."""

    @abstractmethod
    def rewards(
        self, problem: Problem, completion: Completion
    ) -> RewardResult | Awaitable[RewardResult]:
        """Named rewards of one rollout. Their sum, weighted by `reward_weights` of the run file, is
        the scalar that trains.

        Unless it is a coroutine function, it is called in a separate thread, several at a time.
        A rollout fails if this raises, or takes longer than `env_timeout_s`.
        """


class MultiTurnEnv(SingleTurnEnv):
    """An env that answers the policy, until the conversation is over."""

    @abstractmethod
    def reply(
        self, problem: Problem, messages: Sequence[Message]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """The messages that follow the policy's last one: results of tools, or a user's next turn.
        None, or no message, means that the conversation is over.

        Unless it is a coroutine function, it is called in a separate thread, several at a time.
        If this raises, or takes longer than `env_timeout_s`, the rollout ends truncated.
        """


class PolicyClient(Protocol):
    """The policy, as one rollout of an AgentLoopEnv asks it."""

    async def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        demonstration: Message | None = None,
    ) -> SampledCompletion:
        """The policy's answer to this conversation. A conversation that continues an earlier one
        continues from its exact tokens.

        `demonstration`: a message of the assistant that answers in place of the policy, for losses
        that imitate (`envs.<name>.loss`). It is recorded with the logprobs that the policy gives
        it.

        Raises SamplingFailed if there is no answer, because none can be had or because a limit of
        the run file is reached; ContextFull is the case that the prompt leaves no room.
        """
        ...


class Truncated(Exception):
    """Raised in `converse` when a limit of the env's own ends the rollout. `limit` is one of those
    of `Completion.truncation`.
    """

    def __init__(self, limit: str, note: str = "") -> None:
        super().__init__(note)
        self.limit = limit
        self.note = note


class AgentLoopEnv(BaseEnv):
    """An env that runs the conversation itself: it asks the policy as often as it likes, and gives
    the rewards of all rollouts of a problem together.

    The rollouts of a problem that first ask exactly its `messages` and `tools` share one request.
    """

    @abstractmethod
    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        """Run one rollout. Write into `notes` what `judge` needs to know of it.

        It may be cancelled (`rollout_timeout_s`). If it raises, the rollout ends truncated.
        """

    def save_state(self, notes: dict[str, Any], /) -> Any:
        """The state that `converse` needs besides the messages to continue this rollout, as plain
        values of at most 64 KiB. Called at each request, where model calls are recorded.

        None: there is no such state. A process that follows this one then runs `converse` again
        from its beginning, and its requests are answered as they were. Tools run again too.
        """
        return None

    async def load_state(self, problem: Problem, state: Any, notes: dict[str, Any], /) -> None:
        """Restore what `save_state` gave at the last recorded request, in another process, before
        `converse` is called. `converse` then begins with that request.
        """

    @abstractmethod
    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> Sequence[RewardResult | Exception]:
        """The rewards of each rollout, by its notes, or the reason why there are none. Rollouts in
        which the policy gave no answer are not among them.
        """
