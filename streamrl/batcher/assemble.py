"""Chosen groups become one Batch record: their columns are concatenated, and each sequence gets its
row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from streamrl.batcher.balance import costs_of
from streamrl.batcher.packing import pack
from streamrl.stream.records import Batch, Column, JoinedGroup, columns_of
from streamrl.stream.records.compact import join_ids, join_logprobs
from streamrl.stream.records.fields import size_bound
from streamrl.stream.records.sequences import values_by_sequence


class Sharding(NamedTuple):
    """How the rows of a batch are divided among processes."""

    processes: int = 1  # that train on it, each on as many rows
    balance: str = "tokens"  # what each process is to have as much of as the others (`balance.py`)
    hidden: int = 0  # hidden size of the model


JOINED = {"ids": join_ids, "logprobs": join_logprobs}
UNSHARDED = Sharding()


def drop_too_long(group: JoinedGroup, max_seq_len: int) -> tuple[JoinedGroup, JoinedGroup | None]:
    """The group with the rollouts that fit into rows, and the group with the others, if any. A
    rollout is trained on as a whole or not at all.
    """
    too_long = group.sequence_lengths > max_seq_len
    if not too_long.any():
        return group, None
    # By uid and not by offset: a sequence branches from others of its uid, and keeps them.
    uids = {group.uids[sequence] for sequence in np.flatnonzero(too_long)}
    dropped = np.array([uid in uids for uid in group.uids])
    return select_sequences(group, ~dropped), select_sequences(group, dropped)


def select_sequences(group: JoinedGroup, keep: np.ndarray) -> JoinedGroup:
    """The group with only the sequences where `keep` (n,) bool is true. Their advantages stay as
    they were.
    """
    masks = {per: np.repeat(keep, each) for per, each in values_by_sequence(group).items()}
    kept = dict[str, Any]()
    for name, column in columns_of(JoinedGroup).items():
        array = getattr(group, name)
        if array is not None:
            kept[name] = array[masks[column.per]]
    kept["uids"] = [uid for uid, kept in zip(group.uids, keep, strict=True) if kept]
    return msgspec.structs.replace(group, **kept)


def join_column(groups: Sequence[JoinedGroup], name: str) -> np.ndarray | None:
    """The column of all groups, one after another. None where it is optional and no group has it;
    where some have it, it is filled in for the others (`Column.fill`). So it is for a group whose
    tokens have another number of values than those of the first one that has it.
    """
    arrays = [getattr(group, name) for group in groups]
    if all(array is None for array in arrays):
        return None
    column = columns_of(JoinedGroup)[name]
    if column.form:
        return JOINED[column.form]([array for array in arrays if array is not None])
    shape = next(array.shape[1:] for array in arrays if array is not None)
    return np.concatenate(
        [
            filled(group, column, shape) if array is None or array.shape[1:] != shape else array
            for group, array in zip(groups, arrays, strict=True)
        ]
    )


def filled(group: JoinedGroup, column: Column, shape: tuple[int, ...] = ()) -> np.ndarray:
    """What an optional column is where the group does not have it. `shape`: of each value."""
    each = values_by_sequence(group)[column.per]
    if isinstance(column.fill, str):
        return np.repeat(getattr(group, column.fill), each)
    return np.full((int(each.sum()), *shape), column.fill, column.dtype)


def within_bytes(groups: Sequence[JoinedGroup], limit: int) -> int:
    """How many of these groups, from the first on, make a batch of at most `limit` bytes; at least
    one. A column that one group has is filled in for the others, and a normalizer may add an
    advantage for each token.
    """
    columns = columns_of(JoinedGroup)
    counts = {"sequence": 0, "token": 0, "span": 0, "sampled": 0}
    widths = dict[str, int]()  # by column: bytes of a value
    others = 0
    for index, group in enumerate(groups):
        counts["sequence"] += len(group.uids)
        counts["token"] += len(group.tokens)
        spans = group.uids if group.span_starts is None else group.span_starts
        counts["span"] += len(spans)
        counts["sampled"] += len(group.policy_logprobs)
        others += size_bound(group)
        for name in columns:
            array = getattr(group, name)
            if array is not None:
                others -= array.nbytes
                width = array.itemsize * math.prod(array.shape[1:])
                widths[name] = max(width, widths.get(name, 0))
        size = others + 4 * counts["sampled"]
        size += sum(width * counts[columns[name].per] for name, width in widths.items())
        if size > limit and index:
            return index
    return len(groups)


def join_prompt_experts(
    groups: Sequence[JoinedGroup], experts: np.ndarray | None
) -> np.ndarray | None:
    """The routed experts of all prompts, one after another: (sum of prompts, layers, k), 0 where a
    group has none. `experts`: (sum of lengths, layers, k), those of the other tokens.
    """
    if experts is None:
        return None
    shape = experts.shape[1:]
    arrays = list[np.ndarray]()
    for group in groups:
        array = group.prompt_routed_experts
        if array is None or array.shape[1:] != shape:
            array = np.zeros((len(group.prompt), *shape), experts.dtype)
        arrays.append(array)
    return np.concatenate(arrays)


def assemble(
    groups: Sequence[JoinedGroup],
    number: int,
    policy_version: int,
    row_count: int,
    max_seq_len: int,
    sharding: Sharding = UNSHARDED,
) -> Batch | None:
    """The batch of these groups, or None when `row_count` rows of `max_seq_len` tokens do not hold
    them.
    """
    lengths = np.concatenate([group.sequence_lengths for group in groups])
    costs = costs_of(lengths, sharding.balance, sharding.hidden)
    rows = pack(lengths, max_seq_len, row_count, sharding.processes, costs)
    if rows is None:
        return None
    environments = sorted({group.environment for group in groups})
    env_numbers = [environments.index(group.environment) for group in groups]
    sizes = [len(group.uids) for group in groups]
    columns: dict[str, Any] = {
        name: join_column(groups, name)
        for name in columns_of(JoinedGroup)
        if name in columns_of(Batch)
    }
    return Batch(
        number=number,
        policy_version=policy_version,
        row_count=row_count,
        max_seq_len=max_seq_len,
        processes=sharding.processes,
        environments=environments,
        group_ids=[group.group_id for group in groups],
        group_environments=np.array(env_numbers, np.int32),
        prompts=join_ids([group.prompt for group in groups]),
        prompt_lengths=np.array([len(group.prompt) for group in groups], np.int32),
        uids=[uid for group in groups for uid in group.uids],
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), sizes),
        rows=rows,
        prompt_routed_experts=join_prompt_experts(groups, columns["routed_experts"]),
        **columns,
    )
