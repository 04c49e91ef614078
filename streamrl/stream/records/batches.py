"""From groups to batches: what the buffer, the batcher and the scorers write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from streamrl.stream.records.fields import (
    Array,
    BatchNumber,
    Column,
    Name,
    Record,
    check_columns,
    check_experts,
    check_floats,
    check_lengths,
    check_token_ids,
    total_of,
)
from streamrl.stream.records.sequences import completion_lengths, counts_of


class ScoredGroup(Record, frozen=True, kw_only=True):
    """The rollouts of one problem with their advantages. An empty one means that a group closed
    with nothing to train on.

    It refers to its rollouts by their offsets, and has none of their tokens. The batcher joins it
    with them (`JoinedGroup`).

    One entry is one sequence. A rollout that forked has several, next to each other, with the same
    uid, offset, advantage and reward. Columns by sampled token are ragged: the values of the
    sequences, one after another. The prompt precedes each sequence.
    """

    environment: Name
    group_id: Name
    problem_id: Name
    producer: Name  # empty: the group was counted before
    epoch: int = 0  # of its first rollout
    # This is no group: retention has deleted rollouts that the buffer had not read, so the accounts
    # of the env's producers begin anew (`Demand.epoch`).
    begins_epoch: bool = False
    partition: int  # of the env's topic of rollouts
    # the offset of each rollout in that partition
    offsets: Annotated[Array, Column("sequence", "<i8")]
    uids: list[Name]
    prompt_length: int = 0  # unsampled tokens that all sequences begin with
    # tokens of each sequence, without the prompt and those of the sequence that it branches from
    lengths: Annotated[Array, Column("sequence", "<i4")]
    # A sequence may branch from another of its rollout, which is so many sequences before it, and
    # share the first tokens after the prompt with it. None when no sequence does; 0: this one does
    # not.
    branches_from: Annotated[Array | None, Column("sequence", "<i4")] = None
    branches_at: Annotated[Array | None, Column("sequence", "<i4")] = None
    # The tokens that were sampled: spans of each sequence, in order. None when all were, so that
    # each sequence is one span.
    span_counts: Annotated[Array | None, Column("sequence", "<i4", fill=1)] = None
    span_starts: Annotated[Array | None, Column("span", "<i4")] = None  # 0: its first token
    span_lengths: Annotated[Array | None, Column("span", "<i4", fill="lengths")] = None
    advantages: Annotated[Array, Column("sequence", "<f4", finite=True)]  # of the whole rollout
    # of the sampled tokens; None when each has the advantage of its rollout
    token_advantages: Annotated[
        Array | None, Column("sampled", "<f4", fill="advantages", finite=True)
    ] = None
    rewards: Annotated[Array, Column("sequence", "<f4", source="reward", finite=True)]
    temperatures: Annotated[Array, Column("sequence", "<f4", source="temperature")]
    oldest_versions: Annotated[Array, Column("sequence", "<i4", source="policy_version")]
    newest_versions: Annotated[Array, Column("sequence", "<i4", source="newest_policy_version")]
    # None when none is
    truncated: Annotated[Array | None, Column("sequence", "|u1", source="truncated")] = None
    # how much each loss counts (`LossWeights`); None: the policy gradient alone, with weight 1
    policy_gradient_weights: Annotated[
        Array | None, Column("sampled", "<f4", fill=1, finite=True)
    ] = None
    cross_entropy_weights: Annotated[Array | None, Column("sampled", "<f4", finite=True)] = None
    teacher_kl_weights: Annotated[Array | None, Column("sampled", "<f4", finite=True)] = None

    def __post_init__(self) -> None:
        what = f"group {self.group_id!r}"
        check_columns(what, self, counts_of(what, self))
        lowest = min(self.prompt_length, self.partition, int(self.offsets.min(initial=0)))
        if lowest < 0:
            raise ValueError(f"{what}: {lowest} is no prompt_length, partition or offset")

    @property
    def sequence_lengths(self) -> np.ndarray:
        """(n,) int: the tokens of each sequence, with the prompt and what it branches from."""
        return completion_lengths(self) + np.int32(self.prompt_length)

    @property
    def total_tokens(self) -> int:
        """Tokens it costs in a batch."""
        return int(self.sequence_lengths.sum(dtype=np.int64))


class JoinedGroup(ScoredGroup, frozen=True, kw_only=True):
    """A scored group with what its rollouts have of its tokens. It is never written: the batcher
    makes it of the two records.

    Columns by token are ragged like those by sampled token, and cut by `lengths`.
    """

    prompt: Array  # (prompt_length,) ids
    tokens: Annotated[Array, Column("token", "<u2", source="tokens", form="ids")]
    # of the sampled tokens
    policy_logprobs: Annotated[Array, Column("sampled", "<f4", source="logprobs", form="logprobs")]
    # (tokens, layers, k), as in a Turn; None when no turn has them
    routed_experts: Annotated[
        Array | None, Column("token", "|u1", source="routed_experts", ndim=3)
    ] = None
    prompt_routed_experts: Array | None = None  # (prompt_length, layers, k)

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"group {self.group_id!r}"
        check_token_ids(f"{what}: the prompt", self.prompt)
        check_lengths(what, self, ("prompt",), self.prompt_length)
        check_prompt_experts(what, self, self.prompt_length)


class Batch(Record, frozen=True, kw_only=True):
    """What the learner trains on at policy version `number`: whole groups, packed into rows.
    Readable by itself.

    Ragged like its groups: `prompts` are cut by `prompt_lengths` (one a group), columns by token
    are cut by `lengths` (one a sequence; a rollout that forked has several, under the same uid).
    Sequence i belongs to group `groups[i]` and is in row `rows[i]`, after those of that row that
    come before it in the arrays. `learner/model/examples.py:expand` makes the fixed, dense
    RlExample of it.
    """

    number: BatchNumber
    policy_version: int  # the newest version the batcher had heard of
    row_count: int
    max_seq_len: int
    processes: int = 1  # that train on it; number p has the rows from p * row_count / processes on
    environments: list[Name]
    group_ids: list[Name]
    group_environments: Annotated[Array, Column("group", "<i4")]  # index into environments
    prompts: Array  # (sum of prompt_lengths,) ids
    prompt_lengths: Annotated[Array, Column("group", "<i4")]
    uids: list[Name]
    groups: Annotated[Array, Column("sequence", "<i4")]  # index into group_ids
    rows: Annotated[Array, Column("sequence", "<i4")]
    lengths: Annotated[Array, Column("sequence", "<i4")]
    # where a sequence branches from another, as in a ScoredGroup
    branches_from: Annotated[Array | None, Column("sequence", "<i4")] = None
    branches_at: Annotated[Array | None, Column("sequence", "<i4")] = None
    tokens: Annotated[Array, Column("token", "<u2", form="ids")]
    # the tokens that were sampled, as in a ScoredGroup
    span_counts: Annotated[Array | None, Column("sequence", "<i4", fill=1)] = None
    span_starts: Annotated[Array | None, Column("span", "<i4")] = None
    span_lengths: Annotated[Array | None, Column("span", "<i4", fill="lengths")] = None
    policy_logprobs: Annotated[Array, Column("sampled", "<f4", form="logprobs")]
    advantages: Annotated[Array, Column("sequence", "<f4", finite=True)]  # of the whole rollout
    # of the sampled tokens; None when each has the advantage of its rollout
    token_advantages: Annotated[
        Array | None, Column("sampled", "<f4", fill="advantages", finite=True)
    ] = None
    rewards: Annotated[Array, Column("sequence", "<f4", finite=True)]
    temperatures: Annotated[Array, Column("sequence", "<f4")]
    oldest_versions: Annotated[Array, Column("sequence", "<i4")]
    # how much each loss counts (`LossWeights`); None: the policy gradient alone, with weight 1
    policy_gradient_weights: Annotated[
        Array | None, Column("sampled", "<f4", fill=1, finite=True)
    ] = None
    cross_entropy_weights: Annotated[Array | None, Column("sampled", "<f4", finite=True)] = None
    teacher_kl_weights: Annotated[Array | None, Column("sampled", "<f4", finite=True)] = None
    # (tokens, layers, k), as in a Turn; None when no turn has them
    routed_experts: Annotated[Array | None, Column("token", "|u1", ndim=3)] = None
    prompt_routed_experts: Array | None = None  # (sum of prompt_lengths, layers, k)

    def __post_init__(self) -> None:
        what = f"batch {self.number}"
        if self.processes < 1 or self.row_count % self.processes:
            raise ValueError(
                f"{what}: {self.row_count} rows cannot be divided among {self.processes} processes"
            )
        counts = {"group": len(self.group_ids), **counts_of(what, self)}
        check_columns(what, self, counts)
        prompt_tokens = total_of(f"{what}: prompt_lengths", self.prompt_lengths)
        check_lengths(what, self, ("prompts",), prompt_tokens)
        check_token_ids(f"{what}: prompts", self.prompts)
        check_prompt_experts(what, self, prompt_tokens)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """(n,) int: the tokens of each sequence, with its prompt and what it branches from."""
        return self.prompt_lengths[self.groups] + completion_lengths(self)


def first_of_rollout_mask(uids: Sequence[str]) -> np.ndarray:
    """(n,) bool: true for the first sequence of each rollout. The sequences of a rollout are next
    to each other.
    """
    return np.array([i == 0 or uid != uids[i - 1] for i, uid in enumerate(uids)], bool)


def mean_rewards(batch: Batch) -> dict[str, float]:
    """The mean reward of each env's rollouts in the batch. A rollout counts once, however many
    sequences it has. A sequence of a group that does not exist is of no env.
    """
    is_grouped = (batch.groups >= 0) & (batch.groups < len(batch.group_ids))
    envs = np.full(len(batch.groups), -1, np.int32)
    envs[is_grouped] = batch.group_environments[batch.groups[is_grouped]]
    first = first_of_rollout_mask(batch.uids)
    means = dict[str, float]()
    for index, env in enumerate(batch.environments):
        rewards = batch.rewards[first & (envs == index)]
        if len(rewards):
            means[env] = float(rewards.mean(dtype=np.float64))
    return means


def check_prompt_experts(what: str, record: JoinedGroup | Batch, length: int) -> None:
    """The experts of prompts of `length` tokens have the layers of those of the other tokens."""
    prompts = record.prompt_routed_experts
    if prompts is None:
        return
    check_experts(f"{what}: prompt_routed_experts", prompts, length)
    others = record.routed_experts
    if others is None or others.shape[1:] != prompts.shape[1:]:
        raise ValueError(f"{what}: prompt_routed_experts do not fit routed_experts")


class Demand(Record, frozen=True, kw_only=True):
    """How much work the batcher wants from an env: its replicas together keep what they have
    launched and not seen closed within `wanted_tokens`.
    """

    environment: Name
    # for the next batches, less what the batcher holds, or in place of envs that supply too little;
    # 0 when it has enough
    wanted_tokens: int
    held_tokens: int
    # by producer, since the run began: groups that came to an end in the buffer
    closed_groups: dict[Name, int]
    missing_tokens: int = 0  # how many the next batch is short of right now
    # by producer, since the run began: groups that it may have begun; empty: as many as
    # `wanted_tokens` allows
    granted_groups: dict[Name, int] = {}
    # How often retention has deleted groups that were not counted. When it grows, a producer has
    # begun as many groups as are closed, and those that it has not published.
    epoch: int = 0


class Scores(Record, frozen=True, kw_only=True):
    """Logprobs of a batch's sampled tokens under the reference, and under the teacher if there is
    one.
    """

    number: BatchNumber  # the batch
    scorer: Name  # the worker
    # policy version of the model; -1: that of learner.kl.reference.path; -2: the pool was
    # not asked for a reference, and `logprobs` are 0
    reference: int
    logprobs: Array  # (n,) float32: of the batch's sampled tokens
    teacher_logprobs: Array | None = None  # (n,) float32: likewise; None: there is no teacher

    def __post_init__(self) -> None:
        what = f"scores of batch {self.number}"
        check_floats(f"{what}: logprobs", self.logprobs, None)
        if self.teacher_logprobs is not None:
            check_floats(f"{what}: teacher_logprobs", self.teacher_logprobs, len(self.logprobs))
