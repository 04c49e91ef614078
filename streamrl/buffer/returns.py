"""What each token of a rollout can still change: its reward-to-go, and how much better that is than
the reward-to-go of its peers.

A reward at the end of a turn, or at a token, cannot be the merit of the tokens after it. So token t
of rollout i is judged by

    G_i(t) = rest_i + sum of the rewards at token t or after it,

where rest_i is what the rollout earned as a whole, and t counts its sampled tokens. "After" is a
matter of time: the turns of a session with sub-agents are in several sequences, and a turn that
began before another had ended gets none of the other's rewards. The token's advantage is the
group's advantage function applied to G_1(t) ... G_n(t): a baseline that depends on the position. A
rollout that has ended by then has G_i(t) = rest_i. With leave-one-out (RLOO) the estimate is
unbiased, as each baseline is made of other rollouts. At t = 0 this is the advantage of the whole
rollouts. It is the same at every t if no reward is at a turn or token.

Reward-to-go with a baseline: Williams 1992, REINFORCE; Schulman et al., arXiv:1506.02438, section
2. The per-step form for groups of rollouts: GRPO with process supervision, arXiv:2402.03300,
section 4.1.3.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np

from streamrl.buffer.advantages import Advantage, check_advantages
from streamrl.stream.records import Rollout, Turn, TurnTokens


def token_advantages(rollouts: Sequence[Rollout], advantage: Advantage) -> list[np.ndarray] | None:
    """The advantage of each sampled token, one array (sampled tokens,) float32 for each rollout.

    None where no rollout earns a reward before its last sampled token: the advantage is then the
    same all over each rollout. Raises ValueError when the advantage function does not return one
    finite number for each rollout.
    """
    if not any(_earns_early(rollout) for rollout in rollouts):
        return None
    orders = [_order_in_time(rollout) for rollout in rollouts]
    goals = [
        np.append(goal[order], goal[-1])
        for goal, order in zip(map(reward_to_go, rollouts), orders, strict=True)
    ]
    width = max(len(goal) for goal in goals)
    # (rollouts, width)
    columns = np.stack([np.pad(goal, (0, width - len(goal)), mode="edge") for goal in goals])
    # Consecutive columns that are equal have one advantage, so the function is called once for
    # them.
    changes = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0)))
    judged = np.empty((len(goals), len(changes)), np.float32)
    for i, t in enumerate(changes):
        judged[:, i] = check_advantages(advantage(columns[:, t].astype(np.float32)), len(goals))
    spread = np.repeat(judged, np.diff(np.append(changes, width)), axis=1)
    return [spread[i, np.argsort(order)] for i, order in enumerate(orders)]


def reward_to_go(rollout: Rollout) -> np.ndarray:
    """G(t) for each sampled token, in the order of the turns: (sampled tokens + 1,) float64. The
    last value is the rest, which belongs to no token.
    """
    earned = per_token_rewards(rollout.turns)
    rest = rollout.reward - float(earned.sum())
    ahead = _still_to_come(rollout.turns, earned)
    return rest + np.append(ahead[sampled_mask(rollout.turns)], 0.0)


def turn_times(turns: Sequence[Turn]) -> list[tuple[float, float]]:
    """When each turn began and ended. The turns of a sequence follow each other, and those of
    several sequences are ordered by their timestamps. Without forks, or where a timestamp is
    missing, the order of the turns is the time.
    """
    stamps = [turn.timestamp or math.nan for turn in turns]
    if not any(turn.fork for turn in turns) or not all(map(math.isfinite, stamps)):
        return [(float(i), float(i + 1)) for i in range(len(turns))]
    times = list[tuple[float, float]]()
    before = -math.inf  # when the turn before it in its sequence ended
    for turn, stamp in zip(turns, stamps, strict=True):
        if turn.fork:
            before = -math.inf
        end = max(stamp, before)
        is_answer = turn.logprobs is not None and before > -math.inf
        times.append((before if is_answer else end, end))
        before = end
    return times


def _still_to_come(turns: Sequence[Turn], earned: np.ndarray) -> np.ndarray:
    """For each token, the sum of what is earned at it, after it in its turn, and in the turns that
    began when its own had ended. `earned`: (tokens of all turns,). Returns the same shape and type.
    """
    bounds = np.cumsum([0, *(len(tokens_of(turn)) for turn in turns)])
    of_turns = [earned[start:end] for start, end in itertools.pairwise(bounds)]
    times = turn_times(turns)
    begins = sorted((begin, i) for i, (begin, _) in enumerate(times))
    totals = np.array([of_turns[i].sum() for _, i in begins], earned.dtype)
    later = np.append(np.cumsum(totals[::-1])[::-1], earned.dtype.type(0))
    ahead = [np.zeros(0, earned.dtype)]
    for i, of_turn in enumerate(of_turns):
        after = later[bisect.bisect_right(begins, (times[i][1], i))]
        ahead.append(np.cumsum(of_turn[::-1])[::-1] + after)
    return np.concatenate(ahead)


def per_token_rewards(turns: Sequence[Turn]) -> np.ndarray:
    """The reward that was earned at each token: (tokens of all turns,) float64. The reward of a
    turn falls at its last token.
    """
    earned = [np.zeros(0)]
    for turn in turns:
        tokens = tokens_of(turn)
        if turn.token_rewards is None:
            of_turn = np.zeros(len(tokens))
        else:
            of_turn = turn.token_rewards.astype(np.float64)
        if len(of_turn) and turn.reward:
            of_turn[-1] += turn.reward
        earned.append(of_turn)
    return np.concatenate(earned)


def sampled_mask(turns: Sequence[Turn]) -> np.ndarray:
    """(tokens of all turns,) bool: true where the policy sampled."""
    masks = [np.zeros(0, bool)]
    for turn in turns:
        if turn.tokens is not None:
            masks.append(np.full(len(turn.tokens), turn.logprobs is not None))
    return np.concatenate(masks)


def tokens_of(turn: Turn | TurnTokens) -> np.ndarray:
    assert turn.tokens is not None, "a rollout that can be trained on has the tokens of every turn"
    return turn.tokens


def _earns_early(rollout: Rollout) -> bool:
    """Is a reward no merit of one of the sampled tokens, because it fell before it?"""
    if not any(turn.reward or turn.token_rewards is not None for turn in rollout.turns):
        return False
    is_earned = (per_token_rewards(rollout.turns) != 0).astype(np.int64)
    ahead = _still_to_come(rollout.turns, is_earned)[sampled_mask(rollout.turns)]
    return bool((ahead < is_earned.sum()).any())


def _order_in_time(rollout: Rollout) -> np.ndarray:
    """The sampled tokens in the order in which they were sampled: (sampled tokens,) of their
    numbers in the order of the turns.
    """
    sampled = [
        np.full(len(tokens_of(turn)) if turn.logprobs is not None else 0, end)
        for turn, (_, end) in zip(rollout.turns, turn_times(rollout.turns), strict=True)
    ]
    return np.argsort(np.concatenate(sampled), kind="stable")
