"""What each token of a rollout can still change: its reward-to-go, and how much better that is than
its peers'.

A reward that falls at the end of a turn, or at a token, cannot be the merit of what was said after
it. So token t of rollout i is judged by

    G_i(t) = rest_i + sum of the rewards that fall at or behind token t,

where rest_i is what the rollout earned as a whole, and t counts its sampled tokens. Its advantage
is the group's advantage function applied to G_1(t) ... G_n(t): a baseline that depends on the
position (a rollout that is over by then stands with its rest_i). Leave-one-out (RLOO) it is
unbiased, as each baseline is made of other rollouts. At t = 0 this is the advantage of the whole
rollouts, and so it is everywhere when nothing is earned on the way. Reward-to-go with a baseline:
Williams 1992, REINFORCE; Schulman et al., arXiv:1506.02438, section 2. The per-step form for groups
of rollouts: GRPO with process supervision, arXiv:2402.03300, section 4.1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.buffer.advantages import Advantage
from streamrl.records import Rollout, Turn


def rewards_on_the_way(turns: Sequence[Turn]) -> np.ndarray:
    """What was earned at each token: (tokens of all turns,) float64. A turn's reward falls at its
    last token.
    """
    earned = [np.zeros(0)]
    for turn in turns:
        assert turn.tokens is not None, (
            "a rollout that can be trained on has the tokens of every turn"
        )
        mine = (
            np.zeros(len(turn.tokens))
            if turn.token_rewards is None
            else turn.token_rewards.astype(np.float64)
        )
        if len(mine) and turn.reward:
            mine[-1] += turn.reward
        earned.append(mine)
    return np.concatenate(earned)


def sampled(turns: Sequence[Turn]) -> np.ndarray:
    """(tokens of all turns,) bool: true where the policy sampled."""
    return np.concatenate(
        [
            np.zeros(0, bool),
            *(
                np.full(len(turn.tokens), turn.logprobs is not None)
                for turn in turns
                if turn.tokens is not None
            ),
        ]
    )


def to_go(rollout: Rollout) -> np.ndarray:
    """G(t): (sampled tokens + 1,) float64; the last one is what is left when all is said."""
    earned = rewards_on_the_way(rollout.turns)
    ahead = np.cumsum(earned[::-1])[::-1]  # at or behind each token
    rest = rollout.reward - float(earned.sum())
    return rest + np.append(ahead[sampled(rollout.turns)], 0.0)


def token_advantages(rollouts: Sequence[Rollout], advantage: Advantage) -> list[np.ndarray] | None:
    """One array a rollout, (sampled tokens,) float32; None where they are the same all over each
    rollout: nothing was earned on the way.

    Raises ValueError when the advantage function does not return one finite number a rollout.
    """
    if not any(_earns_early(rollout) for rollout in rollouts):
        return None
    goals = [to_go(rollout) for rollout in rollouts]
    width = max(len(goal) for goal in goals)
    # (rollouts, width)
    columns = np.stack([np.pad(goal, (0, width - len(goal)), mode="edge") for goal in goals])
    # the function is asked once for equal columns
    changes = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0)))
    judged = np.empty((len(goals), len(changes)), np.float32)
    for place, t in enumerate(changes):
        judged[:, place] = _checked(advantage(columns[:, t].astype(np.float32)), len(goals))
    spread = np.repeat(judged, np.diff(np.append(changes, width)), axis=1)
    return [spread[i, : len(goal) - 1] for i, goal in enumerate(goals)]


def _earns_early(rollout: Rollout) -> bool:
    """Does a reward fall before its last sampled token?"""
    if not [turn for turn in rollout.turns if turn.reward or turn.token_rewards is not None]:
        return False
    last = int(np.flatnonzero(sampled(rollout.turns))[-1])
    return bool(rewards_on_the_way(rollout.turns)[:last].any())


def _checked(advantages: np.ndarray, n: int) -> np.ndarray:
    if advantages.shape != (n,) or not np.isfinite(advantages).all():
        raise ValueError(
            f"the advantage function returned {advantages!r}, expected {n} finite numbers"
        )
    return advantages
