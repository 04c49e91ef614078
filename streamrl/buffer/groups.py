"""The rollouts of one problem become one scored group, and a group is joined with its rollouts: the
shared prompt is stored once, everything else one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from streamrl.buffer.advantages import Advantage, check_advantages
from streamrl.buffer.returns import token_advantages, tokens_of
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import (
    JoinedGroup,
    LossWeights,
    Rollout,
    RolloutTokens,
    ScoredGroup,
    Turn,
    TurnTokens,
    columns_of,
)
from streamrl.stream.records.compact import compact_ids, join_ids, join_logprobs
from streamrl.stream.records.sequences import common_prefix

# the columns of a group that may be None
OPTIONAL = frozenset(
    field.name for field in msgspec.structs.fields(JoinedGroup) if field.default is None
)
# the columns that only a joined group has
JOINED = tuple(name for name in columns_of(JoinedGroup) if name not in columns_of(ScoredGroup))
POLICY_GRADIENT = LossWeights()


T = TypeVar("T", Turn, TurnTokens)


class Piece(NamedTuple, Generic[T]):
    """The part of a turn that is after the shared prompt: its tokens from number `start` on."""

    turn: T
    start: int
    length: int  # tokens from there on


def score_group(
    events: Sequence[Event], advantage: Advantage, loss: LossWeights = POLICY_GRADIENT
) -> ScoredGroup:
    """The group of these rollouts, in the order given. The prompt of the group is the tokens that
    all its sequences begin with and that were not sampled.

    `loss`: the weights of the turns that have none themselves.
    """
    rollouts = [rollout_of(event) for event in events]
    sequences = list[list[Turn]]()
    numbers = list[int]()  # of the rollout that each sequence belongs to
    distances = list[int]()  # how many sequences before it is the one that it branches from
    for number, rollout in enumerate(rollouts):
        places = dict[int, int]()  # of the rollout's sequences among those of the group
        for of_rollout, turns in trained_sequences(rollout).items():
            place = len(sequences)
            places[of_rollout] = place
            distances.append(place - places[turns[0].fork_of] if turns[0].fork_at else 0)
            sequences.append(turns)
            numbers.append(number)
    roots = [turns for turns in sequences if not turns[0].fork_at]
    prompts = [prompt_of(turns) for turns in roots]
    branching = [turns[0].fork_at for turns in sequences if turns[0].fork_at]
    shared = min([common_prefix(prompts), *branching])
    completions = [_after_prompt(turns, shared) for turns in sequences]
    lengths = [sum([piece.length for piece in completion]) for completion in completions]
    pieces = [piece for completion in completions for piece in completion]
    rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
    advantages = check_advantages(advantage(rewards), len(rewards), rollouts[0].group_id)
    first = rollouts[0]
    return ScoredGroup(
        environment=first.environment,
        group_id=first.group_id,
        problem_id=first.problem_id,
        producer=first.producer,
        epoch=first.epoch,
        begins_epoch=False,
        partition=events[0].partition,
        offsets=np.array([events[number].offset for number in numbers], np.int64),
        uids=[rollouts[number].rollout_uid for number in numbers],
        prompt_length=shared,
        lengths=np.array(lengths, np.int32),
        advantages=advantages[numbers],
        token_advantages=_token_advantages(rollouts, advantage),
        **_spans(completions),
        **_branches(sequences, distances, shared),
        **_rollout_columns([rollouts[number] for number in numbers]),
        **_loss_columns(pieces, loss),
    )


def join_rollouts(group: ScoredGroup, rollouts: Sequence[RolloutTokens]) -> JoinedGroup:
    """The group with the tokens of these rollouts, which are its own, in its order. Raises
    ValueError if they do not fit it.
    """
    sequences = [turns for rollout in rollouts for turns in _trained(rollout.sequences).values()]
    shared = group.prompt_length
    pieces = [piece for turns in sequences for piece in _after_prompt(turns, shared)]
    columns = _turn_columns(pieces)
    experts = columns["routed_experts"]
    prompt_experts = None if experts is None else _prompt_experts(sequences[0], shared, experts)
    return JoinedGroup(
        **{name: getattr(group, name) for name in ScoredGroup.__struct_fields__},
        **columns,
        prompt=prompt_of(sequences[0])[:shared],
        prompt_routed_experts=prompt_experts,
    )


def _loss_columns(pieces: Sequence[Piece[Turn]], loss: LossWeights) -> dict[str, np.ndarray]:
    """The columns of the losses' weights: (sampled tokens,) float32 each. There are none where the
    policy gradient alone trains all turns.
    """
    sampled = [piece for piece in pieces if piece.turn.logprobs is not None]
    weights = [piece.turn.loss or loss for piece in sampled]
    lengths = [piece.length for piece in sampled]
    columns = dict[str, np.ndarray]()
    for name, default in msgspec.structs.asdict(POLICY_GRADIENT).items():
        values = [getattr(weight, name) for weight in weights]
        if any(value != default for value in values):
            columns[f"{name}_weights"] = np.repeat(np.array(values, np.float32), lengths)
    return columns


def _rollout_columns(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray | None]:
    """The columns of a group that are values of its rollouts (`Column.source`).

    `rollouts`: of each sequence. An optional column is None if all values are 0.
    """
    columns = dict[str, np.ndarray | None]()
    for name, column in columns_of(ScoredGroup).items():
        if column.source:
            values = [getattr(rollout, column.source) for rollout in rollouts]
            is_needed = name not in OPTIONAL or any(values)
            columns[name] = np.array(values, column.dtype) if is_needed else None
    return columns


def _turn_columns(pieces: Sequence[Piece[TurnTokens]]) -> dict[str, Any]:
    """The columns of a group that are values of its turns (`Column.source`).

    `pieces`: of all sequences. An optional column is None if no turn has the values.
    """
    columns = dict[str, Any]()
    for name in JOINED:
        column = columns_of(JoinedGroup)[name]
        arrays = [getattr(piece.turn, column.source) for piece in pieces]
        if column.form == "logprobs":
            columns[name] = join_logprobs([array for array in arrays if array is not None])
        elif column.form == "ids":
            columns[name] = join_ids([tokens_of(piece.turn)[piece.start :] for piece in pieces])
        elif name in OPTIONAL and all(array is None for array in arrays):
            columns[name] = None
        else:
            # of a token: one value, or as many as the first of these arrays has
            shape = next((array.shape[1:] for array in arrays if array is not None), ())
            columns[name] = np.concatenate(
                [
                    np.full((piece.length, *shape), column.fill, column.dtype)
                    if array is None or array.shape[1:] != shape
                    else array[piece.start :]
                    for piece, array in zip(pieces, arrays, strict=True)
                ]
            )
    return columns


def _prompt_experts(turns: Sequence[TurnTokens], shared: int, like: np.ndarray) -> np.ndarray:
    """The routed experts of the shared prompt, as these turns have them: (shared, layers, k), 0
    where they have none. `like`: (tokens, layers, k), those of the tokens after the prompt.
    """
    experts = np.zeros((shared, *like.shape[1:]), like.dtype)
    start = 0
    for turn in turns:
        end = min(start + len(tokens_of(turn)), shared)
        of_turn = turn.routed_experts
        if of_turn is not None and of_turn.shape[1:] == like.shape[1:]:
            experts[start:end] = of_turn[: end - start]
        start = end
    return experts


def joined_bytes(events: Sequence[Event]) -> int:
    """At most so many bytes have the columns of the group of these rollouts that it has only once
    it is joined with them. Of routed experts each token has as many as those that have most.
    """
    turns = [turn for event in events for turn in rollout_of(event).turns]
    experts = [turn.routed_experts for turn in turns if turn.routed_experts is not None]
    width = max([array.itemsize * math.prod(array.shape[1:]) for array in experts], default=0)
    size = 0
    for turn in turns:
        size += turn.token_count * width
        size += sum([array.nbytes for array in (turn.tokens, turn.logprobs) if array is not None])
    return size


def trained_sequences(rollout: Rollout) -> dict[int, list[Turn]]:
    """The turns of each of the rollout's sequences, by its number: what the model saw at once. One
    in which nothing was sampled teaches nothing and is left out.
    """
    return _trained(rollout.sequences)


def _trained(sequences: Sequence[list[T]]) -> dict[int, list[T]]:
    return {
        number: turns
        for number, turns in enumerate(sequences)
        if any(turn.logprobs is not None and turn.logprobs.size for turn in turns)
    }


def prompt_of(turns: Sequence[Turn] | Sequence[TurnTokens]) -> np.ndarray:
    """The tokens before the first sampled turn: what the policy was asked."""
    asked = list[np.ndarray]()
    for turn in turns:
        if turn.logprobs is not None:
            break
        if turn.tokens is not None:
            asked.append(turn.tokens)
    if len(asked) == 1:
        return compact_ids(asked[0])
    return join_ids(asked) if asked else np.zeros(0, np.uint16)


def rollout_of(event: Event) -> Rollout:
    assert isinstance(event.record, Rollout)
    return event.record


def _after_prompt(turns: Sequence[T], shared: int) -> list[Piece[T]]:
    """The turns of a sequence without the first `shared` tokens of its group. One that branches
    from another does not have them.
    """
    if turns[0].fork_at:
        shared = 0
    pieces = list[Piece[T]]()
    for turn in turns:
        length = len(tokens_of(turn))
        start = min(shared, length)
        shared -= start
        if start < length:
            pieces.append(Piece(turn, start, length - start))
    return pieces


def _branches(
    sequences: Sequence[Sequence[Turn]], distances: Sequence[int], shared: int
) -> dict[str, np.ndarray]:
    """The columns of where sequences branch from others, after a prompt of `shared` tokens. There
    are none where no sequence does.
    """
    if not any(distances):
        return {}
    branches_at = np.array([max(turns[0].fork_at - shared, 0) for turns in sequences], np.int32)
    branches_from = np.where(branches_at > 0, np.array(distances, np.int32), 0)
    return {"branches_from": branches_from.astype(np.int32), "branches_at": branches_at}


def _spans(sequences: Sequence[Sequence[Piece[Turn]]]) -> dict[str, np.ndarray]:
    """The columns of the spans that were sampled. There are none where all tokens were."""
    if all(piece.turn.logprobs is not None for pieces in sequences for piece in pieces):
        return {}
    counts = list[int]()
    starts = list[int]()
    lengths = list[int]()
    for pieces in sequences:
        start = 0
        before = len(starts)
        for piece in pieces:
            if piece.turn.logprobs is not None:
                starts.append(start)
                lengths.append(piece.length)
            start += piece.length
        counts.append(len(starts) - before)
    return {
        "span_counts": np.array(counts, np.int32),
        "span_starts": np.array(starts, np.int32),
        "span_lengths": np.array(lengths, np.int32),
    }


def _token_advantages(rollouts: Sequence[Rollout], advantage: Advantage) -> np.ndarray | None:
    """(sampled tokens,) float32: the advantage of each. None when every token has the advantage of
    its rollout.
    """
    try:
        by_rollout = token_advantages(rollouts, advantage)
    except ValueError as error:
        raise ValueError(f"group {rollouts[0].group_id}: {error}") from None
    if by_rollout is None:
        return None
    return np.concatenate(by_rollout)
