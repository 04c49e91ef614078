"""What each token of a rollout can still change: its reward-to-go, and how much better that is than
the reward-to-go of its peers.

A reward that falls at the end of a turn, or at a token, cannot be the merit of what was said after
it. So token t of rollout i is judged by

    G_i(t) = rest_i + sum of the rewards that fall at or behind token t,

where rest_i is what the rollout earned as a whole, and t counts its sampled tokens. The token's
advantage is the group's advantage function applied to G_1(t) ... G_n(t): a baseline that depends on
the position. A rollout that is over by then stands with its rest_i. With leave-one-out (RLOO) the
estimate is unbiased, as each baseline is made of other rollouts. At t = 0 this is the advantage of
the whole rollouts, and it is so everywhere when nothing is earned on the way.

Reward-to-go with a baseline: Williams 1992, REINFORCE; Schulman et al., arXiv:1506.02438, section
2. The per-step form for groups of rollouts: GRPO with process supervision, arXiv:2402.03300,
section 4.1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.buffer.advantages import Advantage, check_advantages
from streamrl.records import Rollout, Turn


def token_advantages(rollouts: Sequence[Rollout], advantage: Advantage) -> list[np.ndarray] | None:
    """The advantage of each sampled token, one array (sampled tokens,) float32 for each rollout.

    None where no rollout earns a reward before its last sampled token: the advantage is then the
    same all over each rollout. Raises ValueError when the advantage function does not return one
    finite number for each rollout.
    """
    if not any(_earns_early(rollout) for rollout in rollouts):
        return None
    goals = [reward_to_go(rollout) for rollout in rollouts]
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
    return [spread[i, : len(goal) - 1] for i, goal in enumerate(goals)]


def reward_to_go(rollout: Rollout) -> np.ndarray:
    """G(t) for each sampled token: (sampled tokens + 1,) float64. The last value is the rest, which
    belongs to no token.
    """
    earned = per_token_rewards(rollout.turns)
    ahead = np.cumsum(earned[::-1])[::-1]  # at or behind each token
    rest = rollout.reward - float(earned.sum())
    return rest + np.append(ahead[sampled_mask(rollout.turns)], 0.0)


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


def tokens_of(turn: Turn) -> np.ndarray:
    assert turn.tokens is not None, "a rollout that can be trained on has the tokens of every turn"
    return turn.tokens


def _earns_early(rollout: Rollout) -> bool:
    """Does a reward fall before the last sampled token?"""
    if not any(turn.reward or turn.token_rewards is not None for turn in rollout.turns):
        return False
    last = int(np.flatnonzero(sampled_mask(rollout.turns))[-1])
    return bool(per_token_rewards(rollout.turns)[:last].any())
