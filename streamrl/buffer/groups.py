"""Rollouts of one problem to one scored group: the shared prompt once, everything else one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.buffer.advantages import Advantage
from streamrl.buffer.returns import token_advantages
from streamrl.log.protocol import Event
from streamrl.records import Rollout, ScoredGroup, Turn


def prompt_of(turns: Sequence[Turn]) -> np.ndarray:
    """Tokens before the first sampled turn: what the policy was asked."""
    asked = list[np.ndarray]()
    for turn in turns:
        if turn.logprobs is not None:
            break
        if turn.tokens is not None:
            asked.append(turn.tokens)
    return _join(asked)


def generated_tokens(rollout: Rollout) -> int:
    """Tokens that the policy sampled."""
    return sum([len(turn.logprobs) for turn in rollout.turns if turn.logprobs is not None])


def sequences(rollout: Rollout) -> list[list[Turn]]:
    """Its turns, cut where one is a fork: what the model saw in one piece. A piece in which nothing
    was sampled teaches nothing and is left out.
    """
    cut: list[list[Turn]] = [[]]
    for turn in rollout.turns:
        if turn.fork:
            cut.append([])
        cut[-1].append(turn)
    return [
        turns
        for turns in cut
        if [turn for turn in turns if turn.logprobs is not None and turn.logprobs.size]
    ]


def score(events: Sequence[Event], advantage: Advantage) -> ScoredGroup:
    """One group of the events' rollouts, in the order given. Their shared prompt is what all
    sequences begin with and nobody sampled.
    """
    rollouts = [rollout_of(event) for event in events]
    cut = [sequences(rollout) for rollout in rollouts]
    flat = [turns for parts in cut for turns in parts]
    # the rollout of each sequence, by number
    origins = [i for i, parts in enumerate(cut) for _ in parts]
    whose = [rollouts[i] for i in origins]
    prompts = [prompt_of(turns) for turns in flat]
    shared = common_prefix(prompts)
    own = [_behind(turns, shared) for turns in flat]
    pieces = [piece for of_one in own for piece in of_one]
    tokens, mask = np.concatenate([ids for ids, _ in pieces]), _mask(pieces)
    rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
    truncated = [rollout.truncated for rollout in whose]
    first = rollouts[0]
    return ScoredGroup(
        environment=first.environment,
        group_id=first.group_id,
        problem_id=first.problem_id,
        producer=first.producer,
        partition=events[0].partition,
        offsets=np.array([events[i].offset for i in origins], np.int64),
        uids=[rollout.rollout_uid for rollout in whose],
        prompt=prompts[0][:shared],
        lengths=np.array([sum([len(ids) for ids, _ in of_one]) for of_one in own], np.int32),
        tokens=tokens,
        policy_logprobs=np.concatenate(
            [
                np.zeros(len(ids), np.float32) if logprobs is None else logprobs
                for ids, logprobs in pieces
            ]
        ),
        loss_mask=mask,
        advantages=checked(advantage(rewards), first.group_id, len(rewards))[origins],
        token_advantages=_by_token(rollouts, advantage, mask, len(tokens)),
        rewards=rewards[origins],
        temperatures=np.array([rollout.temperature for rollout in whose], np.float32),
        oldest_versions=np.array([rollout.policy_version for rollout in whose], np.int32),
        newest_versions=np.array([rollout.newest_policy_version for rollout in whose], np.int32),
        truncated=np.array(truncated, np.uint8) if any(truncated) else None,
    )


def nothing(
    environment: str, group_id: str, problem_id: str, producer: str, partition: int
) -> ScoredGroup:
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


def _by_token(
    rollouts: Sequence[Rollout], advantage: Advantage, mask: np.ndarray | None, total: int
) -> np.ndarray | None:
    """(total,) float32: the advantage of each token behind the shared prompt, 0 where not sampled;
    None when they are those of the rollouts.
    """
    try:
        found = token_advantages(rollouts, advantage)
    except ValueError as error:
        raise ValueError(f"group {rollouts[0].group_id}: {error}") from None
    if found is None:
        return None
    spread = np.zeros(total, np.float32)
    spread[slice(None) if mask is None else mask > 0] = np.concatenate(found)
    return spread


def checked(advantages: np.ndarray, group_id: str, n: int) -> np.ndarray:
    """What an advantage function of somebody else's returned, as (n,) float32. Raises ValueError
    naming the group.
    """
    if advantages.shape != (n,) or not np.isfinite(advantages).all():
        raise ValueError(
            f"group {group_id}: the advantage function returned {advantages!r}, expected {n} finite numbers"
        )
    return advantages.astype(np.float32, copy=False)


def rollout_of(event: Event) -> Rollout:
    assert isinstance(event.record, Rollout)
    return event.record


def common_prefix(arrays: Sequence[np.ndarray]) -> int:
    """How many values all of these one-dimensional arrays begin with."""
    shared = min([len(array) for array in arrays], default=0)
    if not shared:
        return 0
    head = arrays[0][:shared].tobytes()  # as bytes: a tenth of the time that comparing values takes
    for array in arrays[1:]:
        if array[:shared].tobytes() != head:
            differs = array[:shared] != arrays[0][:shared]
            shared = int(differs.argmax()) if differs.any() else shared
            head = arrays[0][:shared].tobytes()
    return shared


Piece = tuple[np.ndarray, np.ndarray | None]  # tokens, and their logprobs where they were sampled


def _behind(turns: Sequence[Turn], shared: int) -> list[Piece]:
    """The turns behind their first `shared` tokens."""
    pieces: list[Piece] = []
    for turn in turns:
        assert turn.tokens is not None, (
            "a rollout that can be trained on has the tokens of every turn"
        )
        skip = min(shared, len(turn.tokens))
        shared -= skip
        if skip < len(turn.tokens):
            pieces.append(
                (turn.tokens[skip:], None if turn.logprobs is None else turn.logprobs[skip:])
            )
    return pieces


def _mask(pieces: Sequence[Piece]) -> np.ndarray | None:
    """(sum of lengths,) uint8: 1 where sampled; None when all is."""
    if all(logprobs is not None for _, logprobs in pieces):
        return None
    return np.concatenate(
        [np.full(len(tokens), logprobs is not None, np.uint8) for tokens, logprobs in pieces]
    )


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.uint16)
