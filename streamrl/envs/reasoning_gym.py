"""Any task of reasoning-gym: procedural problems with a verifier, made offline. `params: {task: chain_sum, ...}`; the others go to the task."""

from __future__ import annotations

import difflib
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from streamrl.envs.base import Answer, Problem

SIZE = 2**31 - 1  # the tasks make problems on demand; this only bounds the index


class ReasoningGym:
    """Reward: the task's own score of the answer, between 0 and 1."""

    def __init__(self, seed: int, task: str, **kwargs: Any) -> None:
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, 3)
            raise ValueError(f"no task {task!r} among reasoning-gym's {len(DATASETS)}; near: {', '.join(near) or 'none'}")
        self.dataset = reasoning_gym.create_dataset(task, seed=seed, size=SIZE, **kwargs)

    def problem(self, index: int) -> Problem:
        entry = self.dataset[index]
        return Problem([{"role": "user", "content": entry["question"]}], entry)

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        return {"score": float(self.dataset.score_answer(answer.text.strip(), problem.answer))}
