"""Chosen groups to one Batch record: concatenated, each rollout with its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamrl.batcher.balance import costs_of
from streamrl.batcher.packing import pack
from streamrl.records import Batch, ScoredGroup


class Division(NamedTuple):
    """How the rows of a batch are divided."""

    processes: int = 1  # that train on it, each on as many rows
    balance: str = "tokens"  # what each is to have as much of as the others (`balance.py`)
    hidden: int = 0  # hidden size of the model


WHOLE = Division()


def totals(group: ScoredGroup) -> np.ndarray:
    """(n,) int32: tokens of each sequence, prompt included."""
    return group.lengths + np.int32(len(group.prompt))


def heads(uids: Sequence[str]) -> np.ndarray:
    """(n,) bool: which sequence is the first of its rollout. Those of one rollout lie next to each
    other.
    """
    return np.array([i == 0 or uid != uids[i - 1] for i, uid in enumerate(uids)], bool)


def fitting(group: ScoredGroup, max_seq_len: int) -> tuple[ScoredGroup, ScoredGroup | None]:
    """What of the group fits into rows, and what does not, if anything. A rollout is trained on as
    a whole or not at all.
    """
    too_long = totals(group) > max_seq_len
    if not too_long.any():
        return group, None
    out = np.isin(group.offsets, group.offsets[too_long])
    return only(group, ~out), only(group, out)


def only(group: ScoredGroup, keep: np.ndarray) -> ScoredGroup:
    """The group with only the sequences where `keep` (n,) bool is true; advantages stay as they
    were.
    """
    tokens = np.repeat(keep, group.lengths)
    n_arrays = (
        "offsets",
        "lengths",
        "advantages",
        "rewards",
        "temperatures",
        "oldest_versions",
        "newest_versions",
    )
    fields = {name: getattr(group, name)[keep] for name in n_arrays}
    return ScoredGroup(
        environment=group.environment,
        group_id=group.group_id,
        problem_id=group.problem_id,
        producer=group.producer,
        partition=group.partition,
        uids=[uid for uid, kept in zip(group.uids, keep, strict=True) if kept],
        prompt=group.prompt,
        tokens=group.tokens[tokens],
        policy_logprobs=group.policy_logprobs[tokens],
        loss_mask=None if group.loss_mask is None else group.loss_mask[tokens],
        token_advantages=None if group.token_advantages is None else group.token_advantages[tokens],
        truncated=None if group.truncated is None else group.truncated[keep],
        **fields,
    )


def advantages_by_token(group: ScoredGroup) -> np.ndarray:
    """(sum of lengths,) float32: each token's own, or its rollout's."""
    return (
        np.repeat(group.advantages, group.lengths)
        if group.token_advantages is None
        else group.token_advantages
    )


def assemble(
    groups: Sequence[ScoredGroup],
    number: int,
    policy_version: int,
    row_count: int,
    max_seq_len: int,
    division: Division = WHOLE,
) -> Batch | None:
    """The batch of these groups, or None when `row_count` rows of `max_seq_len` tokens do not hold
    them.
    """
    lengths = np.concatenate([totals(group) for group in groups])
    rows = pack(
        lengths,
        max_seq_len,
        row_count,
        division.processes,
        costs_of(lengths, division.balance, division.hidden),
    )
    if rows is None:
        return None
    environments = sorted({group.environment for group in groups})
    sizes = [len(group.uids) for group in groups]

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(group, name) for group in groups])

    by_token = None
    if any(group.token_advantages is not None for group in groups):
        by_token = np.concatenate([advantages_by_token(group) for group in groups])
    masks = [
        np.ones(len(group.tokens), np.uint8) if group.loss_mask is None else group.loss_mask
        for group in groups
    ]
    return Batch(
        number=number,
        policy_version=policy_version,
        row_count=row_count,
        max_seq_len=max_seq_len,
        processes=division.processes,
        environments=environments,
        group_ids=[group.group_id for group in groups],
        group_environments=np.array(
            [environments.index(group.environment) for group in groups], np.int32
        ),
        prompts=join("prompt"),
        prompt_lengths=np.array([len(group.prompt) for group in groups], np.int32),
        uids=[uid for group in groups for uid in group.uids],
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), sizes),
        rows=rows,
        lengths=join("lengths"),
        tokens=join("tokens"),
        policy_logprobs=join("policy_logprobs"),
        loss_mask=None
        if all(group.loss_mask is None for group in groups)
        else np.concatenate(masks),
        advantages=join("advantages"),
        token_advantages=by_token,
        rewards=join("rewards"),
        temperatures=join("temperatures"),
        oldest_versions=join("oldest_versions"),
    )
