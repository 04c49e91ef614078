"""Problems from a file, with one of several rewards. All of them are posed once an epoch, in
another order each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.shipped.copy_digits import positions_right
from streamrl.envs.shipped.math_verify import MathVerify
from streamrl.envs.shipped.samples import Columns, read
from streamrl.text import nearest_or_all

REWARDS = ("math-verify", "exact", "positions", "none")


class Dataset(SingleTurnEnv):
    """The reward is one of these:

    - `math-verify`: `correct`, whether the answer is the same mathematics as the right one.
    - `exact`: `correct`, whether it is the same text.
    - `positions`: the share of its characters that stand in the right position; the end is one.
    - `none`: functions of the run file judge, by `problem.answer` and `problem.metadata`.

    `file` is relative to where the env is started: JSON Lines or Parquet with these columns, as
    `samples.py` reads them. The columns to `keep` are published with each rollout, as are its
    `line` and `epoch`. `instruction` is added to the end of each prompt.
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
            hint = nearest_or_all(reward, REWARDS)
            raise ValueError(f"no reward {reward!r}; {hint}")
        self.reward = reward
        self.instruction = instruction
        columns = Columns(prompt, tokens, answer, tuple(keep))
        self._samples = read(Path(file), columns, needs_answer=reward != "none")
        for sample in self._samples:
            if instruction and sample.tokens:
                raise ValueError(
                    f"{file}:{sample.line}: an instruction cannot follow a prompt of token ids"
                )
        self._order = EpochOrder(seed, len(self._samples))
        self._verify = MathVerify(timeout_s)

    def dataset_index(self, number: int) -> DatasetIndex:
        return self._order(number)

    def problem(self, number: int) -> Problem:
        posed = self.dataset_index(number)
        sample = self._samples[posed.problem]
        messages = sample.messages
        if self.instruction:
            *before, last = messages
            content = f"{last['content']}\n{self.instruction}"
            messages = [*before, {**last, "content": content}]
        return Problem(
            messages=messages,
            answer=sample.answer,
            metadata={**sample.kept, "line": sample.line, "epoch": posed.epoch},
            tokens=sample.tokens,
        )

    async def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        match self.reward:
            case "math-verify":
                return {"correct": await self._verify(problem, completion, {})}
            case "exact":
                return {"correct": float(completion.text.strip() == problem.answer.strip())}
            case "positions":
                return {"positions": positions_right(problem.answer, completion)}
            case _:
                return {}

    async def close(self) -> None:
        await self._verify.close()
