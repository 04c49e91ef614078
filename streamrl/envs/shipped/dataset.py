"""Problems from a file, by any of several rewards: all of them once an epoch, in another order each
time.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from streamrl.envs.api import Answer, Problem
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.shipped.copy_digits import positions_right
from streamrl.envs.shipped.math_verify import MathVerify
from streamrl.envs.shipped.samples import Columns, read

REWARDS = ("math-verify", "exact", "positions", "none")


class Dataset:
    """Reward: `correct`, that the answer is the right one, as mathematics (`math-verify`) or as
    text (`exact`); `positions`, the share of its characters that stand in their place, the end
    being one; `none`: functions of the run file judge, with `problem.answer` and
    `problem.metadata`.

    `file`, relative to where the env is started: JSON Lines or Parquet, as `samples.py` reads it,
    with these columns; those to `keep` are published with each rollout, as are its `line` and
    `epoch`. `instruction` is said behind each prompt.
    """

    def __init__(
        self,
        seed: int,
        file: str,
        reward: str = "math-verify",
        prompt: str = "prompt",
        tokens: str = "input_token_ids",
        answer: str = "gt_answer",
        keep: Sequence[str] = (),
        instruction: str = "",
        timeout_s: float = 5.0,
    ) -> None:
        if reward not in REWARDS:
            near = difflib.get_close_matches(reward, REWARDS, 1)
            raise ValueError(
                f"no reward {reward!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(REWARDS)}")
            )
        self.reward, self.instruction = reward, instruction
        self._samples = read(
            Path(file), Columns(prompt, tokens, answer, tuple(keep)), needs_answer=reward != "none"
        )
        if instruction and (given := [sample.line for sample in self._samples if sample.tokens]):
            raise ValueError(
                f"{file}:{given[0]}: an instruction cannot follow a prompt of token ids"
            )
        self._epochs = EpochOrder(seed, len(self._samples))
        self._verify = MathVerify(timeout_s)

    def dataset_index(self, index: int) -> DatasetIndex:
        return self._epochs(index)

    def problem(self, index: int) -> Problem:
        epoch, which = self.dataset_index(index)
        sample = self._samples[which]
        messages = sample.messages
        if self.instruction:
            *before, last = messages
            messages = [*before, {**last, "content": f"{last['content']}\n{self.instruction}"}]
        return Problem(
            messages,
            sample.answer,
            {**sample.kept, "line": sample.line, "epoch": epoch},
            tokens=sample.tokens,
        )

    async def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        match self.reward:
            case "math-verify":
                return {"correct": await self._verify(problem, answer, {})}
            case "exact":
                return {"correct": float(answer.text.strip() == problem.answer.strip())}
            case "positions":
                return {"positions": positions_right(problem.answer, answer)}
            case _:
                return {}

    async def close(self) -> None:
        await self._verify.close()
