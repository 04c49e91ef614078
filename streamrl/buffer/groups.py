"""The rollouts of one problem become one scored group: the shared prompt is stored once, everything
else one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.buffer.advantages import Advantage
from streamrl.buffer.returns import token_advantages, tokens_of
from streamrl.log.protocol import Event
from streamrl.records import Rollout, ScoredGroup, Turn

Piece = tuple[np.ndarray, np.ndarray | None]  # tokens, and their logprobs where they were sampled


def score_group(events: Sequence[Event], advantage: Advantage) -> ScoredGroup:
    """The group of these rollouts, in the order given. The prompt of the group is what all its
    sequences begin with and nobody sampled.
    """
    rollouts = [rollout_of(event) for event in events]
    sequences = list[list[Turn]]()
    sources = list[int]()  # the rollout that each sequence belongs to, by its number
    for number, rollout in enumerate(rollouts):
        for turns in split_sequences(rollout):
            sequences.append(turns)
            sources.append(number)
    prompts = [prompt_of(turns) for turns in sequences]
    shared = common_prefix(prompts)
    completions = [_behind(turns, shared) for turns in sequences]
    lengths = [sum([len(tokens) for tokens, _ in pieces]) for pieces in completions]
    pieces = [piece for completion in completions for piece in completion]
    tokens = np.concatenate([tokens for tokens, _ in pieces])
    mask = _mask(pieces)
    logprobs = [
        np.zeros(len(tokens), np.float32) if sampled is None else sampled
        for tokens, sampled in pieces
    ]
    rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
    advantages = check_advantages(advantage(rewards), rollouts[0].group_id, len(rewards))
    temperatures = np.array([rollout.temperature for rollout in rollouts], np.float32)
    oldest_versions = np.array([rollout.policy_version for rollout in rollouts], np.int32)
    newest_versions = np.array([rollout.newest_policy_version for rollout in rollouts], np.int32)
    truncated = np.array([rollout.truncated for rollout in rollouts], np.uint8)
    first = rollouts[0]
    return ScoredGroup(
        environment=first.environment,
        group_id=first.group_id,
        problem_id=first.problem_id,
        producer=first.producer,
        partition=events[0].partition,
        offsets=np.array([event.offset for event in events], np.int64)[sources],
        uids=[rollouts[number].rollout_uid for number in sources],
        prompt=prompts[0][:shared],
        lengths=np.array(lengths, np.int32),
        tokens=tokens,
        policy_logprobs=np.concatenate(logprobs),
        loss_mask=mask,
        advantages=advantages[sources],
        token_advantages=_token_advantages(rollouts, advantage, mask, len(tokens)),
        rewards=rewards[sources],
        temperatures=temperatures[sources],
        oldest_versions=oldest_versions[sources],
        newest_versions=newest_versions[sources],
        truncated=truncated[sources] if truncated[sources].any() else None,
    )


def empty_group(
    environment: str, group_id: str, problem_id: str, producer: str, partition: int
) -> ScoredGroup:
    """The record of a group that closed with nothing to train on: its env may launch another."""
    no_ints = np.zeros(0, np.int32)
    no_floats = np.zeros(0, np.float32)
    return ScoredGroup(
        environment=environment,
        group_id=group_id,
        problem_id=problem_id,
        producer=producer,
        partition=partition,
        offsets=np.zeros(0, np.int64),
        uids=[],
        prompt=np.zeros(0, np.uint16),
        lengths=no_ints,
        tokens=np.zeros(0, np.uint16),
        policy_logprobs=no_floats,
        advantages=no_floats,
        rewards=no_floats,
        temperatures=no_floats,
        oldest_versions=no_ints,
        newest_versions=no_ints,
    )


def split_sequences(rollout: Rollout) -> list[list[Turn]]:
    """The rollout's turns, cut where one is a fork: each piece is what the model saw at once. A
    piece in which nothing was sampled teaches nothing and is left out.
    """
    pieces: list[list[Turn]] = [[]]
    for turn in rollout.turns:
        if turn.fork:
            pieces.append([])
        pieces[-1].append(turn)
    return [
        turns
        for turns in pieces
        if any(turn.logprobs is not None and turn.logprobs.size for turn in turns)
    ]


def prompt_of(turns: Sequence[Turn]) -> np.ndarray:
    """The tokens before the first sampled turn: what the policy was asked."""
    asked = list[np.ndarray]()
    for turn in turns:
        if turn.logprobs is not None:
            break
        if turn.tokens is not None:
            asked.append(turn.tokens)
    if len(asked) == 1:
        return asked[0]
    return np.concatenate(asked) if asked else np.zeros(0, np.uint16)


def generated_tokens(rollout: Rollout) -> int:
    """The number of tokens that the policy sampled."""
    return sum([len(turn.logprobs) for turn in rollout.turns if turn.logprobs is not None])


def rollout_of(event: Event) -> Rollout:
    assert isinstance(event.record, Rollout)
    return event.record


def check_advantages(advantages: np.ndarray, group_id: str, n: int) -> np.ndarray:
    """The result of somebody else's advantage function, as (n,) float32. Raises ValueError naming
    the group.
    """
    if advantages.shape != (n,) or not np.isfinite(advantages).all():
        raise ValueError(
            f"group {group_id}: the advantage function returned {advantages!r}, "
            f"expected {n} finite numbers"
        )
    return advantages.astype(np.float32, copy=False)


def common_prefix(arrays: Sequence[np.ndarray]) -> int:
    """The number of values that all of these one-dimensional arrays begin with."""
    shared = min([len(array) for array in arrays], default=0)
    if not shared:
        return 0
    # Comparing bytes takes a tenth of the time of comparing values.
    head = arrays[0][:shared].tobytes()
    for array in arrays[1:]:
        if array[:shared].tobytes() != head:
            differs = array[:shared] != arrays[0][:shared]
            shared = int(differs.argmax()) if differs.any() else shared
            head = arrays[0][:shared].tobytes()
    return shared


def _behind(turns: Sequence[Turn], shared: int) -> list[Piece]:
    """The turns behind their first `shared` tokens."""
    pieces: list[Piece] = []
    for turn in turns:
        tokens = tokens_of(turn)
        skip = min(shared, len(tokens))
        shared -= skip
        if skip < len(tokens):
            logprobs = None if turn.logprobs is None else turn.logprobs[skip:]
            pieces.append((tokens[skip:], logprobs))
    return pieces


def _mask(pieces: Sequence[Piece]) -> np.ndarray | None:
    """(sum of lengths,) uint8: 1 where a token was sampled; None when all tokens were."""
    if all(logprobs is not None for _, logprobs in pieces):
        return None
    return np.concatenate(
        [np.full(len(tokens), logprobs is not None, np.uint8) for tokens, logprobs in pieces]
    )


def _token_advantages(
    rollouts: Sequence[Rollout], advantage: Advantage, mask: np.ndarray | None, total: int
) -> np.ndarray | None:
    """(total,) float32: the advantage of each token behind the shared prompt, 0 where it was not
    sampled. None when every token has the advantage of its rollout.
    """
    try:
        found = token_advantages(rollouts, advantage)
    except ValueError as error:
        raise ValueError(f"group {rollouts[0].group_id}: {error}") from None
    if found is None:
        return None
    spread = np.zeros(total, np.float32)
    sampled = slice(None) if mask is None else mask > 0
    spread[sampled] = np.concatenate(found)
    return spread
