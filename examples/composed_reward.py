"""Rewards of one's own, made of others. Named in a run file as

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

from streamrl.envs.api import Answer, Earned, Problem


class Brief:
    """-1 for each sampled token beyond the first so many: at the token itself, so that only what
    was said up to it is blamed.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens

    def __call__(self, problem: Problem, answer: Answer, earned: Mapping[str, float]) -> Earned:
        return Earned(
            tokens=[
                {"brief": [-1.0 * (i >= self.most_tokens) for i in range(len(said.tokens))]}
                for said in answer.said
            ]
        )


def right_and_brief(problem: Problem, answer: Answer, earned: Mapping[str, float]) -> float:
    """A product, which no weights could make of its factors."""
    return earned["score"] * (earned["brief"] == 0)
