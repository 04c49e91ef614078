"""Any task of reasoning-gym: procedural problems with a verifier, made offline. `params: {task: chain_sum, ...}`; the others go to the task.

Three tasks iterate over sets of strings: isomorphic_strings, polynomial_multiplication and ransom_note give the same problems in another process only
under the same PYTHONHASHSEED, which the orchestrator sets; set it where you start such an env by hand.
"""

from __future__ import annotations

import difflib
import random
from functools import lru_cache
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from streamrl.envs.base import Answer, Problem

CHUNK = 500  # problems of one dataset: the library's own default. Some tasks draw all their problems at once, or refuse more than 20,000


class ReasoningGym:
    """Reward: the task's own score of the answer, between 0 and 1."""

    def __init__(self, seed: int, task: str, **kwargs: Any) -> None:
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, 3)
            raise ValueError(f"no task {task!r} among reasoning-gym's {len(DATASETS)}; near: {', '.join(near) or 'none'}")
        if task == "composite":  # the one task whose settings are objects
            kwargs["datasets"] = [DatasetSpec(**spec) for spec in kwargs.get("datasets", [])]
        # The library makes problem i from its seed + i: seeds 1 and 2 would share all problems but one.
        self._first = first = random.Random(f"{task} {seed}").randrange(2**31)

        @lru_cache(maxsize=2)
        def dataset(chunk: int) -> Any:
            return reasoning_gym.create_dataset(task, seed=(first + chunk * CHUNK) % 2**31, size=CHUNK, **kwargs)

        self._dataset = dataset
        self._verifier = dataset(0)  # scores depend on the task's settings, not on the chunk

    def problem(self, index: int) -> Problem:
        random.seed(self._first + index)  # a task may draw from the global generators too (list_functions does; codeio from numpy's)
        np.random.seed((self._first + index) % 2**32)
        entry = self._dataset(index // CHUNK)[index % CHUNK]
        return Problem([{"role": "user", "content": entry["question"]}], entry)

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        try:
            score = float(self._verifier.score_answer(answer.text.strip(), problem.answer))
        except Exception:  # some verifiers stumble over what they cannot parse: that is a wrong answer, not a failed generation
            score = 0.0
        return {"score": score}
