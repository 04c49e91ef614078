"""What envs write: rollouts, and how far each replica is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from streamrl.stream.records.fields import (
    Array,
    Name,
    Record,
    check_depth,
    check_experts,
    check_floats,
    check_logprobs,
    check_token_ids,
)


class VersionSpan(Record, frozen=True, array_like=True, kw_only=True):
    """Tokens `start` to `end` (exclusive) of a turn were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class InferenceMetadata(Record, frozen=True, kw_only=True):
    """How a turn was sampled: what the learner needs to reproduce the distribution, and what a
    person needs to find the server.
    """

    server: Name
    temperature: float
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    max_tokens: int = 0
    finish_reason: str = ""  # `stop` or `length`
    version_spans: list[VersionSpan] = []
    latency_s: float = 0.0


class LossWeights(Record, frozen=True, kw_only=True):
    """How much each loss counts at a token (`learner/loss/components.py`)."""

    policy_gradient: float = 1.0  # learner.loss
    cross_entropy: float = 0.0  # as in supervised fine-tuning
    teacher_kl: float = 0.0  # divergence from the teacher, as in distillation

    def __post_init__(self) -> None:
        weights = msgspec.structs.astuple(self)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(f"loss weights {weights}: each must be finite and at least 0")


class Turn(Record, frozen=True, kw_only=True):
    """A single message of a rollout, with the very tokens the model saw or sampled.

    What it earned counts from its last token backwards (`reward`) or at each token
    (`token_rewards`); both are part of the rollout's `reward`.
    """

    message: str  # its text
    role: str  # `user`, `assistant`, ...
    tokens: Array | None = None  # (n,) ids
    # (n,) of the distribution sampled from; None when the policy did not sample this turn
    logprobs: Array | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}  # what `reward` was made of, by name, before weights
    token_rewards: Array | None = None  # (n,) float32: weighted, on top of `reward`
    # The tokens so far are not what the model saw next: a new sequence begins here. Its first
    # `fork_at` tokens are those of sequence `fork_of` of the rollout, counted from 0, and are not
    # repeated in `tokens`.
    fork: bool = False
    fork_of: int = 0
    fork_at: int = 0
    inference_metadata: InferenceMetadata | None = None
    timestamp: float | None = None  # s
    loss: LossWeights | None = None  # of its sampled tokens; None: those of its env
    # (n, layers, k) uint8 or uint16: the k experts of each layer that each token was sent to,
    # counted from 1; 0 where they are not known. Only a mixture of experts has them, where the
    # server reports them. A token has at most 4,096 in all layers.
    routed_experts: Array | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_token_ids("turn tokens", self.tokens)
        if self.logprobs is not None:
            check_logprobs(
                "turn logprobs", self.logprobs, None if self.tokens is None else len(self.tokens)
            )
        if self.token_rewards is not None:
            check_floats(
                "turn token_rewards",
                self.token_rewards,
                self.token_count,
            )
        if self.routed_experts is not None:
            check_experts("turn routed_experts", self.routed_experts, self.token_count)
        if self.fork_of < 0 or self.fork_at < 0 or (self.fork_at and not self.fork):
            raise ValueError(f"turn: fork_of {self.fork_of} and fork_at {self.fork_at} are no fork")
        if not (
            math.isfinite(self.reward or 0.0) and all(map(math.isfinite, self.rewards.values()))
        ):
            raise ValueError("turn: a reward is not finite")

    @property
    def token_count(self) -> int:
        return 0 if self.tokens is None else len(self.tokens)


class Rollout(Record, frozen=True, kw_only=True):
    """A sequence of turns and what it earned; `failure` is why there is nothing to train on, so
    that its group can still close.

    Its turns' tokens, one after another, are what the model saw; where a turn is a `fork` another
    such sequence begins (a chat template that rewrites history), so a rollout may be several. A
    fork may branch from an earlier sequence in which something was sampled, so that their common
    tokens are in the record once.
    """

    environment: Name  # its topic is the env's, or that of its family
    problem_id: Name  # any text; may come again
    rollout_uid: Name  # unique in the env: a second one is a duplicate
    turns: list[Turn]  # empty where there is a `failure`
    metadata: dict[str, Any] = {}  # anything, to 32 levels and 1 MiB
    # The key of the record. Rollouts of one group are compared; one that comes for a closed group
    # is filtered.
    group_id: Name
    producer: Name  # the env replica: its outstanding work is counted back to it
    reward: float = 0.0  # the scalar that trains
    # what it was made of, by name, over all its turns, before weights
    rewards: dict[str, float] = {}
    temperature: float = 1.0  # 1e-6 to 1e6
    policy_version: int  # of its oldest token
    newest_policy_version: int  # of its newest token
    truncated: bool = False  # by a limit; `metadata["truncation"]` is which
    failure: str = ""  # why there is nothing to train on
    # Why its tokens cannot be those that the policy saw. Such a rollout is invalid and never
    # trained on.
    misaligned: str = ""
    epoch: int = 0  # the newest `Demand.epoch` that its producer had read when it was published
    # Other sessions of its group that were open, or waited for rewards, when it was published.
    # None: not known.
    open_sessions: int | None = None

    def __post_init__(self) -> None:
        if not self.rollout_uid or not self.group_id:
            raise ValueError("rollout_uid and group_id must not be empty")
        # versions travel as int32
        if not (0 <= self.policy_version <= self.newest_policy_version < 2**31):
            span = f"{self.policy_version} to {self.newest_policy_version}"
            raise self._invalid(f"policy versions {span} are not a span")
        if not (math.isfinite(self.reward) and all(map(math.isfinite, self.rewards.values()))):
            raise self._invalid("a reward is not finite")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise self._invalid(f"temperature {self.temperature} is not above 0")
        check_depth(self.metadata)
        if not (self.failure or self.misaligned):
            sampled = 0
            for turn in self.turns:
                if turn.tokens is None:
                    raise self._invalid("a turn has no tokens")
                if turn.logprobs is not None:
                    sampled += turn.logprobs.size
            if not sampled:
                raise self._invalid("no turn was sampled (logprobs missing)")
            self._check_forks()

    @property
    def sequences(self) -> list[list[Turn]]:
        """Its turns, cut where one is a fork."""
        return cut_at_forks(self.turns)

    @property
    def total_tokens(self) -> int:
        """The tokens of all its sequences, with prompts and with what each shares with another."""
        return sum([turn.fork_at + turn.token_count for turn in self.turns])

    @property
    def sampled_tokens(self) -> int:
        """The tokens that the policy sampled."""
        return sum([len(turn.logprobs) for turn in self.turns if turn.logprobs is not None])

    @property
    def sampled_turns(self) -> int:
        """The stretches of tokens that the policy sampled without a break. A fork begins one."""
        count = 0
        for turns in self.sequences:
            was_sampled = False
            for turn in turns:
                is_sampled = turn.logprobs is not None and len(turn.logprobs) > 0
                count += is_sampled and not was_sampled
                was_sampled = is_sampled or (was_sampled and not turn.token_count)
        return count

    def _check_forks(self) -> None:
        """Each fork branches from an earlier sequence with as many tokens, which is trained on."""
        if not any(turn.fork_at for turn in self.turns):
            return
        lengths = list[int]()  # of the sequences so far; 0: nothing was sampled in it
        for turns in self.sequences:
            first = turns[0]
            if first.fork_at and not (
                first.fork_of < len(lengths) and first.fork_at <= lengths[first.fork_of]
            ):
                raise self._invalid(
                    f"sequence {len(lengths)} forks at token {first.fork_at} of sequence"
                    f" {first.fork_of}, which is not an earlier one with as many tokens, some of"
                    " them sampled"
                )
            length = first.fork_at + sum(turn.token_count for turn in turns)
            is_sampled = any(turn.logprobs is not None and turn.logprobs.size for turn in turns)
            lengths.append(length if is_sampled else 0)

    def _invalid(self, why: str) -> ValueError:
        return ValueError(f"rollout {self.rollout_uid!r}: {why}")


class TurnTokens(msgspec.Struct, frozen=True):
    """What a batch needs of a `Turn`. It is part of a checked record, and not checked again."""

    tokens: Array | None = None
    logprobs: Array | None = None
    fork: bool = False
    fork_of: int = 0
    fork_at: int = 0
    routed_experts: Array | None = None


class RolloutTokens(msgspec.Struct, frozen=True):
    """What a batch needs of a `Rollout`. Decoding it takes a fifth of the time."""

    rollout_uid: str
    turns: list[TurnTokens]

    @property
    def sequences(self) -> list[list[TurnTokens]]:
        """Its turns, cut where one is a fork."""
        return cut_at_forks(self.turns)


T = TypeVar("T", Turn, TurnTokens)


def cut_at_forks(turns: Sequence[T]) -> list[list[T]]:
    """The turns of each sequence of a rollout."""
    pieces: list[list[T]] = [[]]
    for turn in turns:
        if turn.fork and pieces[-1]:
            pieces.append([])
        pieces[-1].append(turn)
    return pieces


class EnvProgress(Record, frozen=True, kw_only=True):
    """Where an env replica is: every problem of the replica below `next_problem` is published, left
    out, or in `open_problems`.
    """

    producer: Name
    next_problem: int
    open_problems: list[int] = []
    published_groups: int = 0
    epoch: int = 0  # the newest `Demand.epoch` that it has read
    forgotten_groups: int = 0  # of the published ones, those that no account waits for any more
    replicas: int = 1  # that the env had at the time
    begins: int = 0  # first index that was dealt under the current number of replicas
    # By partition: no record of its open problems is before this offset of turns.<env>.
    turns_from: list[int] = []


class Visit(Record, frozen=True, kw_only=True):
    """How the rollouts of one problem of a finite set did. By its visits a problem may be left out
    of the next epochs (`envs/difficulty_filter.py`).
    """

    environment: Name
    problem: int  # which of the set
    epoch: int
    passed: int  # rollouts
    rollouts: int  # that came to an end, at least 1
    policy_version: int = 0  # of their newest token

    def __post_init__(self) -> None:
        if not 0 <= self.passed <= self.rollouts or not self.rollouts:
            passed = f"{self.passed} of {self.rollouts} rollouts passed"
            raise ValueError(f"visit of problem {self.problem}: {passed}")
