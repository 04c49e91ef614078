"""Problems from a file or the hub, with one of several rewards. All of them are posed once an
epoch, in another order each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.dataset_order import DatasetIndex, EpochOrder
from streamrl.envs.shipped.answers import AnswerPlace, answer_in, check_place
from streamrl.envs.shipped.copy_digits import positions_right
from streamrl.envs.shipped.dataset_templates import TEMPLATES
from streamrl.envs.shipped.hub_rows import hub_rows
from streamrl.envs.shipped.math_verify import MathVerify, unusable_golds
from streamrl.envs.shipped.row_files import parse_rows, rows, unusable
from streamrl.envs.shipped.samples import Columns, Sample, instructed, sample
from streamrl.system.text import nearest_or_all

DATASET_REWARDS = ("math-verify", "exact", "positions", "none")


class Dataset(SingleTurnEnv):
    """The reward is one of these:

    - `math-verify`: `correct`, whether the answer is the same mathematics as the right one.
    - `exact`: `correct`, whether it is the same text.
    - `positions`: the share of its characters that are in the right position; the end is one.
    - `none`: functions of the run file judge, by `problem.answer` and `problem.metadata`.

    `answer` is where the policy's answer is read (`answers.py`). An answer that is cut off earns 0.

    `file` is relative to where the env is started. Instead of one, `hub` is a data set on the
    Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, with its `subset` and `split`. `template`
    tells where a well-known data set has prompt and right answer (`dataset_templates.py`), and
    `columns` names those columns that have other names (`samples.py`). The columns to `keep` are
    published with each rollout, as are its `line` and `epoch`. `instruction` is added to the end of
    the last user message. A right answer that `math-verify` would not take for right is refused
    with its line.
    """

    def __init__(
        self,
        seed: int,
        file: str = "",
        reward: str = "math-verify",
        answer: AnswerPlace = "after-think",
        hub: str = "",
        subset: str = "",
        split: str = "",
        template: str = "",
        columns: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        instruction: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        if reward not in DATASET_REWARDS:
            raise ValueError(f"no reward {reward!r}; {nearest_or_all(reward, DATASET_REWARDS)}")
        if template not in TEMPLATES:
            names = [name for name in TEMPLATES if name]
            raise ValueError(f"no template {template!r}; {nearest_or_all(template, names)}")
        if bool(file) == bool(hub):
            raise ValueError("a dataset has a file, or the name of a data set on the hub")
        if file and (subset or split):
            raise ValueError("subset and split are those of a data set on the hub")
        check_place(answer)
        self.reward = reward
        self.answer: AnswerPlace = answer
        form = TEMPLATES[template]
        named = Columns.named(columns or {}, keep, form.columns)
        told = form.instruction if instruction is None else instruction

        def parse(line: int, row: Any) -> Sample:
            parsed = sample(line, row, named, needs_answer=reward != "none")
            if parsed.answer and template:
                parsed = parsed._replace(answer=form.right_answer(str(parsed.answer)))
            return instructed(parsed, told) if told else parsed

        source = file or " ".join(filter(None, (hub, subset, split or "train")))
        given = rows(Path(file)) if file else hub_rows(hub, subset, split or "train")
        self._samples = parse_rows(given, source, "problems", parse)
        if reward == "math-verify":
            refuse_unusable_golds(source, self._samples)
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


def refuse_unusable_golds(source: str, samples: Sequence[Sample]) -> None:
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
        raise ValueError(unusable(source, bad))
