"""Answers as models write them, 30 right and 30 wrong for each shipped reward, and what each earns.

The answers are in `tables/REWARD.yaml`; a few that are cut off are wrong as well.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from streamrl.envs.api import Completion, PolicyTurn, Problem
from streamrl.envs.shipped.calculator import Calculator
from streamrl.envs.shipped.coding import Coding
from streamrl.envs.shipped.dataset import Dataset
from streamrl.envs.shipped.guess_number import GuessNumber
from streamrl.envs.shipped.judge import Judge
from streamrl.envs.shipped.math_verify import MathVerify
from streamrl.envs.shipped.multiple_choice import MultipleChoice
from streamrl.envs.shipped.reasoning_gym import ReasoningGym
from streamrl.inference.clients.chat_endpoint import NoUsableAnswer
from tests.support.waiting import patience

TABLES = Path(__file__).parent / "tables"
EACH = 30  # right answers, and as many wrong ones
CUT_OFF = "cut off"
JUDGE_CUT_OFF = "judge cut off"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


@dataclass(frozen=True)
class Row:
    """One answer, and what has to come of it."""

    group: str  # right, wrong, CUT_OFF or JUDGE_CUT_OFF
    fields: list[Any]  # as the table's first line explains them

    @property
    def is_right(self) -> bool:
        return self.group == "right"

    def completion(self, text: str, *before: str) -> Completion:
        """What the policy wrote in its last turn, after those `before`."""
        turns = [PolicyTurn(each, np.array([1], np.uint32)) for each in (*before, text)]
        is_finished = self.group != CUT_OFF
        return Completion(text, is_finished, turns, truncation="" if is_finished else "length")


Judged = Callable[[Row], Awaitable[float | None]]
"""What a row earns; None if there is no reward."""


async def earned(name: str, rows: list[Row], directory: Path) -> list[float | None]:
    """What each row earns by a reward. `directory` is for the files of its env."""
    env, judge = REWARD_TABLES[name](directory)
    try:
        return list(await asyncio.gather(*map(judge, rows)))
    finally:
        for each in env if isinstance(env, list) else [env]:
            await each.close()


def rows_of(name: str) -> list[Row]:
    """The rows of a reward's table."""
    table = yaml.safe_load((TABLES / f"{name}.yaml").read_text())
    return [Row(group, fields) for group, listed in table.items() for fields in listed]


def is_as_wanted(name: str, row: Row, reward: float | None) -> bool:
    """Whether a row earned what it has to: 1 if it is right, and less than half if not. A judge's
    verdict is right if it is read as its row has it, and a wrong one gives no reward.
    """
    if name == "judge":
        wanted = row.fields[2] if row.is_right else 0.0 if row.group == CUT_OFF else None
        return reward == wanted
    if row.is_right:
        return reward == 1.0
    if name == "positions" and row.group != CUT_OFF:
        return reward is not None and reward < 1.0  # the share of what is right
    return reward is not None and reward < 0.5


def _math(directory: Path) -> tuple[Any, Judged]:
    verify = MathVerify(timeout_s=patience(10.0))

    async def judge(row: Row) -> float:
        right, text = row.fields
        return await verify(Problem([], right), row.completion(text), {})

    return verify, judge


def _dataset(reward: str, directory: Path) -> tuple[Any, Judged]:
    file = directory / "problems.jsonl"
    file.write_text(json.dumps({"prompt": "?", "gt_answer": "8"}))
    envs = {
        place: Dataset(0, str(file), reward=reward, answer=place)
        for place in ("whole", "after-think", "tag", "boxed")
    }

    async def judge(row: Row) -> float:
        right, text, *place = row.fields
        env = envs[place[0] if place else "after-think"]
        (value,) = (await env.rewards(Problem([], right), row.completion(text))).values()
        return value

    return [*envs.values()], judge


def _choice(directory: Path) -> tuple[Any, Judged]:
    env = MultipleChoice(0)

    async def judge(row: Row) -> float:
        right, text = row.fields
        problem = env.problem(0)._replace(answer=right)
        return env.rewards(problem, row.completion(text))["correct"]

    return env, judge


def _coding(directory: Path) -> tuple[Any, Judged]:
    env = Coding(0, timeout_s=patience(5.0))
    problem = Problem([], ["assert f(1) == 2", "assert f(5) == 6", "assert f(2) == 3"])

    async def judge(row: Row) -> float:
        (text,) = row.fields
        return (await env.rewards(problem, row.completion(text))).rollout["passed"]

    return env, judge


def _reasoning_gym(directory: Path) -> tuple[Any, Judged]:
    tasks = dict.fromkeys(row.fields[0] for row in rows_of("reasoning-gym"))
    envs = {task: ReasoningGym(1, task, scoring={"timeout_s": patience(10.0)}) for task in tasks}
    scorers = next(iter(envs.values())).scorers
    for env in envs.values():
        env.scorers = scorers

    async def judge(row: Row) -> float:
        task, text = row.fields
        env = envs[task]
        problem = env.problem(0)
        right = str(problem.answer["answer"])
        wrong = str(int(right) + 3) if right.lstrip("-").isdigit() else "['x']"
        text = text.replace("{right}", right).replace("{wrong}", wrong)
        return (await env.rewards(problem, row.completion(text)))["score"]

    return envs[next(iter(envs))], judge


def _calculator(directory: Path) -> tuple[Any, Judged]:
    env = Calculator(0)
    problem = Problem([], "42", {"expression": "6*7"})

    async def judge(row: Row) -> float:
        (text,) = row.fields
        return env.rewards(problem, row.completion(text, CALL)).rollout["answer"]

    return env, judge


def _guess(directory: Path) -> tuple[Any, Judged]:
    env = GuessNumber(0)

    async def judge(row: Row) -> float:
        (text,) = row.fields
        return env.rewards(Problem([], 7), row.completion(text)).rollout["found"]

    return env, judge


class JudgeModel(ThreadingHTTPServer):
    """A model over HTTP that answers question N, asked of model N, as row N has it."""

    daemon_threads = True
    request_queue_size = 128  # all rows ask at once

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(("127.0.0.1", 0), JudgeHandler)
        self.rows = rows
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class JudgeHandler(BaseHTTPRequestHandler):
    server: JudgeModel

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        row = self.server.rows[int(body["model"])]
        marker = re.findall("Score ([0-9a-f]{12}): N", body["messages"][0]["content"])[-1]
        said = row.fields[1].replace("{marker}", marker).replace("{other}", "0" * len(marker))
        reason = "length" if row.group == JUDGE_CUT_OFF else "stop"
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": reason, "message": message}
        answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
        data = json.dumps({**answer, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Judges:
    """The judge of each row, and the model that all of them ask."""

    def __init__(self) -> None:
        self.rows = rows_of("judge")
        self.model = JudgeModel(self.rows)
        self.judges: list[Judge] = []
        threading.Thread(target=self.model.serve_forever, args=(0.01,), daemon=True).start()

    async def __call__(self, row: Row) -> float | None:
        number = str(self.rows.index(row))
        judge = Judge(self.model.url, number, attempts=1, timeout_s=patience(30.0))
        self.judges.append(judge)
        problem = Problem([{"role": "user", "content": "2+2=?"}], "4")
        try:
            return await judge(problem, row.completion(row.fields[0]), {})
        except NoUsableAnswer:
            return None

    async def close(self) -> None:
        for judge in self.judges:
            await judge.close()
        self.model.shutdown()
        self.model.server_close()


def _judge(directory: Path) -> tuple[Any, Judged]:
    judges = Judges()
    return judges, judges


REWARD_TABLES: dict[str, Callable[[Path], tuple[Any, Judged]]] = {
    "math-verify": _math,
    "exact": partial(_dataset, "exact"),
    "positions": partial(_dataset, "positions"),
    "multiple-choice": _choice,
    "coding": _coding,
    "reasoning-gym": _reasoning_gym,
    "judge": _judge,
    "calculator": _calculator,
    "guess-number": _guess,
}
