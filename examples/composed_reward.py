"""Rewards of one's own that build on others. A run file names them so:

envs:
  sums:
    kind: reasoning-gym
    params: {task: chain_sum}
    rewards:
      brief: {kind: "examples/composed_reward.py:Brief", params: {most_tokens: 20}}
      right_and_brief: {kind: "examples/composed_reward.py:right_and_brief"}
    reward_weights: {score: 0.5, brief: 0.0, right_and_brief: 0.5}
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.envs.api import Completion, Problem, RewardBreakdown


class Brief:
    """The reward is -1 for each sampled token after the first `most_tokens` of a turn. It is given
    at the token itself, so that only the text up to there is blamed.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens

    def __call__(
        self, problem: Problem, completion: Completion, earned: Mapping[str, float]
    ) -> RewardBreakdown:
        tokens: list[dict[str, list[float]]] = []
        for turn in completion.turns:
            penalties = [-1.0 * (i >= self.most_tokens) for i in range(len(turn.tokens))]
            tokens.append({"brief": penalties})
        return RewardBreakdown(tokens=tokens)


def right_and_brief(problem: Problem, completion: Completion, earned: Mapping[str, float]) -> float:
    """A product of two rewards, which weights alone could not make."""
    return earned["score"] * (earned["brief"] == 0)
