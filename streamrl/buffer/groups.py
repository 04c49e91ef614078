"""Rollouts of one problem to one scored group: the shared prompt once, everything else one after another."""

from __future__ import annotations

from collections.abc import Sequence

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
    shared = min((len(prompt) for prompt in prompts), default=0)
    while any(not np.array_equal(prompt[:shared], prompts[0][:shared]) for prompt in prompts[1:]):
        shared -= 1
    own = [_own_part(rollout, shared) for rollout in rollouts]
    mask = np.concatenate([part[2] for part in own])
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
        lengths=np.array([len(part[0]) for part in own], np.int32),
        tokens=np.concatenate([part[0] for part in own]),
        policy_logprobs=np.concatenate([part[1] for part in own]),
        loss_mask=None if mask.all() else mask,
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


def _own_part(rollout: Rollout, shared: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, logprobs, loss mask) behind the shared prompt; logprobs are 0 where nothing was sampled."""
    turns = [turn for turn in rollout.turns if turn.tokens is not None]
    tokens = _join([turn.tokens for turn in turns if turn.tokens is not None])
    logprobs = [np.zeros(len(turn.tokens), np.float32) if turn.logprobs is None else turn.logprobs for turn in turns if turn.tokens is not None]
    mask = [np.full(len(turn.tokens), turn.logprobs is not None, np.uint8) for turn in turns if turn.tokens is not None]
    return tokens[shared:], np.concatenate(logprobs)[shared:], np.concatenate(mask)[shared:]


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.uint16)
