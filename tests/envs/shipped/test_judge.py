"""A model as a judge, against an endpoint that fails 24 % of the time: every reward is the judge's
own or there is none.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from streamrl.envs.api import Completion, Problem
from streamrl.envs.catalog import make_reward
from streamrl.envs.shipped.judge import Judge
from streamrl.extensions.recordings.rescore import RewardScorer, rescore
from streamrl.inference.clients.chat_endpoint import NoUsableAnswer
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward
from streamrl.system.errors import ConfigError
from tests.support.build import rollout_saying
from tests.support.data_path import publish, published

# Of 25 requests six fail, each in another way.
FAILURES = {3: "500", 7: "429", 11: "ended", 14: "silent", 18: "999", 22: "nan"}
HOPELESS = "13"  # the completion with this number is never judged


class Model(ThreadingHTTPServer):
    """Scores `said N` with 1 + N % 9, and fails as FAILURES say. `asked`: how it was answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.requests = 0
        self.outcomes = Counter[str]()
        self.bodies: list[Any] = []
        self.keys: list[str] = []
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def next_outcome(self, number: str) -> str:
        with self.lock:
            outcome = FAILURES.get(self.requests % 25, "score")
            if number == HOPELESS:
                return "500"
            self.requests += 1
            self.outcomes[outcome] += 1
            return outcome


class Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("Authorization", ""))
        (number,) = re.findall(r"said (\d+)", body["messages"][0]["content"])
        outcome = self.server.next_outcome(number)
        said = {"999": "Score: 999", "nan": "I would say it is fine."}
        if outcome in ("500", "429"):
            self.send_response(int(outcome))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if outcome == "silent":
            self.server.over.wait()
        if outcome in ("silent", "ended"):
            self.close_connection = True
            return
        text = said.get(outcome, f"Not Score: 0 but **Score: {1 + int(number) % 9}**.")
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
        data = json.dumps({**answer, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def model() -> Iterator[Model]:
    server = Model()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def test_with_24_percent_of_failures_each_reward_is_the_judges_own_or_there_is_none(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    params = {
        "base_url": model.url,
        "model": "m",
        "api_key": "env:JUDGE_KEY",
        "pause_s": 0.01,
        "timeout_s": 1.0,
        "attempts": 4,
        "concurrency": 4,
    }
    judge: Any = make_reward("judge", params, "rewards.judge")
    log = MemoryLog({"rollouts.copy": 1, "rewards.copy": 1})
    for number in range(100):
        record = rollout_saying(number)
        publish(log, Output("rollouts.copy", record.group_id, record))

    async def judged() -> Any:
        scorer = RewardScorer(name="judge", version="1", function=judge, env=None, limit_s=60.0)
        try:
            return await rescore(log, "copy", scorer, {})
        finally:
            await judge.close()

    result = asyncio.run(judged())
    assert (result.rescored, result.failed) == (99, 1)
    rewards = published(log, "rewards.copy", Reward)
    for number, reward in enumerate(rewards):
        if str(number) == HOPELESS:
            assert reward.failure.startswith("NoUsableAnswer: m at http://127.0.0.1")
        else:
            assert (reward.value, reward.failure) == ((1 + number % 9) / 10, "")
    failed = sum(count for outcome, count in model.outcomes.items() if outcome != "score")
    assert set(model.outcomes) == {"score", *FAILURES.values()}
    assert 0.2 < failed / model.requests < 0.28
    assert set(model.keys) == {"Bearer k3y"} and model.bodies[0]["temperature"] == 0.0


def test_what_the_judge_is_asked_is_not_rewritten_by_what_the_policy_said():
    judge = Judge("http://127.0.0.1:1/v1", "m", prompt="Q {question} R {answer} A {completion}")
    problem = Problem([{"role": "user", "content": "12="}], answer="21")
    completion = Completion(text="tell me {answer}", finished=True)
    assert judge.question(problem, completion) == "Q 12= R 21 A tell me {answer}"


def test_the_last_score_counts_and_one_outside_the_range_is_none():
    judge = Judge("http://127.0.0.1:1/v1", "m", low=1, high=5)
    assert judge.read_score("Score: 5? No. SCORE: 1.5") == 1.5
    for answer in ("", "five", "Score: ten", "Score: 0", "Score: 5.01"):
        with pytest.raises(ValueError, match="score"):
            judge.read_score(answer)


def test_a_request_that_is_refused_is_not_repeated(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Model, "next_outcome", lambda self, number: "500")
    monkeypatch.setattr("streamrl.inference.clients.chat_endpoint.REFUSED", (500,))
    judge = Judge(model.url, "m", pause_s=0.0)

    async def ask() -> None:
        try:
            await judge(Problem([]), Completion(text="said 1", finished=True), {})
        finally:
            await judge.close()

    with pytest.raises(NoUsableAnswer, match="InternalServerError"):
        asyncio.run(ask())
    assert len(model.bodies) == 1


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ({"low": 3, "high": 3}, "low 3 is not below high 3"),
        ({"attempts": 0}, "attempts 0"),
        ({"prompt": "Judge."}, "shows the judge nothing"),
        ({"score": r"\d+"}, "has no group"),
        ({"api_key": "env:NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"modle": "m"}, "did you mean 'model'"),
        ({"pool": "judge"}, "a judge has a pool, or a base_url and a model"),
        ({"model": ""}, "a judge has a pool, or a base_url and a model"),
    ],
)
def test_settings_that_make_no_judge_are_refused(params: dict[str, Any], cause: str):
    given = {"base_url": "http://127.0.0.1:1/v1", "model": "m", **params}
    with pytest.raises(ConfigError, match=cause):
        make_reward("judge", given, "rewards.judge")


@pytest.mark.parametrize(
    "token",
    [
        *("<unk>", "<s>", "</s>", "<|im_end|>", "<|reserved 1|>", "<start_of_turn>", "<｜User｜>"),
        *("<｜end▁of▁sentence｜>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[gMASK]", "<<SYS>>"),
        *("<think>", "</answer>", "<turn|>", "]~b]", "[e~["),
    ],
)
def test_a_control_token_that_the_policy_wrote_is_broken_up(token: str):
    judge = Judge("http://127.0.0.1:1/v1", "m", prompt="{completion} {conversation}")
    said = f"2{token}3"
    messages = [{"role": "assistant", "content": said}]
    asked = judge.question(Problem([]), Completion(said, True, messages=messages))
    assert token not in asked and "".join(asked.split()) == "".join((said + said).split())


def test_what_is_no_control_token_is_shown_as_it_is():
    judge = Judge("http://127.0.0.1:1/v1", "m", prompt="{completion}")
    for said in ("a < b and c > d", "x[0] + y[i]", "[a, b]", "1 <= 2", "it is <1", "{completion}"):
        assert judge.question(Problem([]), Completion(said, True)) == said


def test_the_marker_changes_with_what_is_judged_and_is_the_same_for_the_same():
    judge = Judge("http://127.0.0.1:1/v1", "m", prompt="{marker} {completion}")
    problem = Problem([{"role": "user", "content": "12="}])
    first, again, other = (
        judge.question(problem, Completion(said, True)).split()[0] for said in ("a", "a", "b")
    )
    assert first == again != other


def test_an_answer_that_is_no_text_is_shown_to_the_judge_as_json():
    judge = Judge("http://127.0.0.1:1/v1", "m", prompt="{answer} {completion}")
    asked = judge.question(Problem([], {"a": [1, "x"]}), Completion("ok", True))
    assert asked == '{"a": [1, "x"]} ok'


def test_a_score_of_ten_thousand_spaces_or_stars_is_read():
    """A search that is not linear would take minutes."""
    judge = Judge("http://127.0.0.1:1/v1", "m")
    for filling in (" ", "*", "*:", "score"):
        with pytest.raises(ValueError, match="no score"):
            judge.read_score("Score:" + filling * 100_000)
