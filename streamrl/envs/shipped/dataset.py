"""Problems from a file, with one of several rewards. All of them are posed once an epoch, in
another order each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.shipped.answers import AnswerPlace, answer_in, check_place
from streamrl.envs.shipped.copy_digits import positions_right
from streamrl.envs.shipped.math_verify import MathVerify, unusable_golds
from streamrl.envs.shipped.row_files import unusable
from streamrl.envs.shipped.samples import Columns, Sample, read
from streamrl.text import nearest_or_all

REWARDS = ("math-verify", "exact", "positions", "none")


class Dataset(SingleTurnEnv):
    """The reward is one of these:

    - `math-verify`: `correct`, whether the answer is the same mathematics as the right one.
    - `exact`: `correct`, whether it is the same text.
    - `positions`: the share of its characters that are in the right position; the end is one.
    - `none`: functions of the run file judge, by `problem.answer` and `problem.metadata`.

    `answer` is where the policy's answer is read (`answers.py`). An answer that is cut off earns 0.

    `file` is relative to where the env is started, and `columns` names those of its columns that
    have other names (`samples.py`). The columns to `keep` are published with each rollout, as are
    its `line` and `epoch`. `instruction` is added to the end of the last user message. A right
    answer that `math-verify` would not take for right is refused with its line.
    """

    def __init__(
        self,
        seed: int,
        file: str,
        reward: str = "math-verify",
        answer: AnswerPlace = "after-think",
        columns: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        instruction: str = "",
        timeout_s: float = 5.0,
    ) -> None:
        if reward not in REWARDS:
            hint = nearest_or_all(reward, REWARDS)
            raise ValueError(f"no reward {reward!r}; {hint}")
        check_place(answer)
        self.reward = reward
        self.answer: AnswerPlace = answer
        self._samples = read(
            Path(file),
            Columns.named(columns or {}, keep),
            needs_answer=reward != "none",
            instruction=instruction,
        )
        if reward == "math-verify":
            refuse_unusable_golds(Path(file), self._samples)
        self._order = EpochOrder(seed, len(self._samples))
        self._verify = MathVerify(timeout_s, answer=answer)

    def dataset_index(self, number: int) -> DatasetIndex:
        return self._order(number)

    def problem(self, number: int) -> Problem:
        posed = self.dataset_index(number)
        sample = self._samples[posed.problem]
        return Problem(
            messages=sample.messages,
            answer=sample.answer,
            metadata={**sample.kept, "line": sample.line, "epoch": posed.epoch},
            tokens=sample.tokens,
        )

    async def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        match self.reward:
            case "math-verify":
                return {"correct": await self._verify(problem, completion, {})}
            case "exact":
                answer = answer_in(completion, self.answer)
                return {"correct": float(answer == problem.answer.strip())}
            case "positions":
                answer = answer_in(completion, self.answer)
                if answer is None:
                    return {"positions": 0.0}
                stated = completion._replace(text=answer)
                return {"positions": positions_right(problem.answer, stated)}
            case _:
                return {}

    async def close(self) -> None:
        await self._verify.close()


def refuse_unusable_golds(path: Path, samples: Sequence[Sample]) -> None:
    """Raises ValueError, which names the lines, if `math-verify` would not take a right answer for
    right.
    """
    golds = [sample.answer for sample in samples]
    # An env may be constructed where a loop runs, which cannot wait for another one.
    with ThreadPoolExecutor(1) as thread:
        causes = thread.submit(lambda: asyncio.run(unusable_golds(golds))).result()
    if causes:
        bad = [
            (samples[index].line, f"the right answer {golds[index][:80]!r} is of no use: {cause}")
            for index, cause in sorted(causes.items())
        ]
        raise ValueError(unusable(path, bad))
