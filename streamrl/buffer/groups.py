"""Rollouts of one problem to one scored group: the shared prompt once, everything else one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from streamrl.buffer.advantages import Advantage
from streamrl.records import Rollout, ScoredGroup, Turn
from streamrl.stream.log import Event


def prompt_of(turns: Sequence[Turn]) -> np.ndarray:
    """Tokens before the first sampled turn: what the policy was asked."""
    first = next(i for i, turn in enumerate(turns) if turn.logprobs is not None)
    return _join([turn.tokens for turn in turns[:first] if turn.tokens is not None])


def generated_tokens(rollout: Rollout) -> int:
    """Tokens that the policy sampled."""
    return sum(len(turn.logprobs) for turn in rollout.turns if turn.logprobs is not None)


def total_tokens(rollout: Rollout) -> int:
    """All its tokens, prompt included."""
    return sum(len(turn.tokens) for turn in rollout.turns if turn.tokens is not None)


def score(events: Sequence[Event], advantage: Advantage) -> ScoredGroup:
    """One group of the events' rollouts, in the order given. Their shared prompt is what they all begin with and nobody sampled."""
    rollouts = [rollout_of(event) for event in events]
    prompts = [prompt_of(rollout.turns) for rollout in rollouts]
    shared = common_prefix(prompts)
    pieces = [piece for rollout in rollouts for piece in _behind(rollout, shared)]
    truncated = np.array([rollout.truncated for rollout in rollouts], np.uint8)
    rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
    first = rollouts[0]
    return ScoredGroup(
        environment=first.environment,
        group_id=first.group_id,
        problem_id=first.problem_id,
        producer=first.producer,
        partition=events[0].partition,
        offsets=np.array([event.offset for event in events], np.int64),
        uids=[rollout.rollout_uid for rollout in rollouts],
        prompt=prompts[0][:shared],
        lengths=np.array([total_tokens(rollout) - shared for rollout in rollouts], np.int32),
        tokens=np.concatenate([tokens for tokens, _ in pieces]),
        policy_logprobs=np.concatenate([np.zeros(len(tokens), np.float32) if logprobs is None else logprobs for tokens, logprobs in pieces]),
        loss_mask=_mask(pieces),
        advantages=checked(advantage(rewards), first.group_id, len(rewards)),
        rewards=rewards,
        temperatures=np.array([rollout.temperature for rollout in rollouts], np.float32),
        oldest_versions=np.array([rollout.policy_version for rollout in rollouts], np.int32),
        newest_versions=np.array([rollout.newest_policy_version for rollout in rollouts], np.int32),
        truncated=truncated if truncated.any() else None,
    )


def nothing(environment: str, group_id: str, problem_id: str, producer: str, partition: int) -> ScoredGroup:
    """The record of a group that closed with nothing to train on: its env may launch another."""
    whole, real = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return ScoredGroup(
        environment=environment,
        group_id=group_id,
        problem_id=problem_id,
        producer=producer,
        partition=partition,
        offsets=np.zeros(0, np.int64),
        uids=[],
        prompt=np.zeros(0, np.uint16),
        lengths=whole,
        tokens=np.zeros(0, np.uint16),
        policy_logprobs=real,
        advantages=real,
        rewards=real,
        temperatures=real,
        oldest_versions=whole,
        newest_versions=whole,
    )


def checked(advantages: np.ndarray, group_id: str, n: int) -> np.ndarray:
    """What an advantage function of somebody else's returned, as (n,) float32. Raises ValueError naming the group."""
    if advantages.shape != (n,) or not np.isfinite(advantages).all():
        raise ValueError(f"group {group_id}: the advantage function returned {advantages!r}, expected {n} finite numbers")
    return advantages.astype(np.float32, copy=False)


def rollout_of(event: Event) -> Rollout:
    assert isinstance(event.record, Rollout)
    return event.record


def common_prefix(arrays: Sequence[np.ndarray]) -> int:
    """How many values all of these one-dimensional arrays begin with."""
    shared = min((len(array) for array in arrays), default=0)
    for array in arrays[1:]:
        differs = array[:shared] != arrays[0][:shared]
        shared = int(differs.argmax()) if differs.any() else shared
    return shared


Piece = tuple[np.ndarray, np.ndarray | None]  # tokens, and their logprobs where they were sampled


def _behind(rollout: Rollout, shared: int) -> Iterator[Piece]:
    """Its turns behind the first `shared` tokens."""
    for turn in rollout.turns:
        assert turn.tokens is not None, "a rollout that can be trained on has the tokens of every turn"
        skip = min(shared, len(turn.tokens))
        shared -= skip
        if skip < len(turn.tokens):
            yield turn.tokens[skip:], None if turn.logprobs is None else turn.logprobs[skip:]


def _mask(pieces: Sequence[Piece]) -> np.ndarray | None:
    """(sum of lengths,) uint8: 1 where sampled; None when all is."""
    if all(logprobs is not None for _, logprobs in pieces):
        return None
    return np.concatenate([np.full(len(tokens), logprobs is not None, np.uint8) for tokens, logprobs in pieces])


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.uint16)
