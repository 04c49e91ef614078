"""Replicas come and go, requests are repeated: each call is sampled and recorded once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streamrl.stream.records import SessionEnd, SessionStart
from tests.support.gateways import Gateways, gateways
from tests.support.waiting import patience, until

RETRY = {"x-stainless-retry-count": "1"}


class Agent:
    """Sends chat completions by hand, to any replica."""

    def __init__(self, gateway: Gateways, url: str, session: str = "s0", **fields: Any) -> None:
        begun = gateway.begin(url, session, **fields)
        self.key = begun["api_key"]
        self.grading = {"authorization": f"Bearer {begun['grading_key']}"}

    def send(self, url: str, *said: str, timeout_s: float = 30.0, **headers: str) -> httpx.Response:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        return httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "policy", "messages": messages},
            headers={"authorization": f"Bearer {self.key}", **headers},
            timeout=patience(timeout_s),
        )

    def ask(self, url: str, *said: str, **headers: str) -> dict[str, Any]:
        answer = self.send(url, *said, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, url: str, *said: str, **headers: str) -> str:
        return self.ask(url, *said, **headers)["choices"][0]["message"]["content"]


def test_another_replica_goes_on_when_the_first_one_has_stopped(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        one = gateway.start()
        agent = Agent(gateway, one)
        said = ["q0"]
        for turn in range(1, 6):
            said += [agent.text(one, *said), f"q{turn}"]
            other = gateway.start()
            gateway.stop(one)
            one = other
        calls = gateway.calls()
    assert [call.continues for call in calls] == ["", *(call.call for call in calls[:-1])]
    assert not any(call.fork for call in calls)


def test_what_one_replica_has_written_the_other_knows(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        said = ["q0"]
        for turn in range(8):
            said += [agent.text(urls[turn % 2], *said), f"q{turn + 1}"]
        calls = gateway.calls()
    assert [call.continues for call in calls] == ["", *(call.call for call in calls[:-1])]


def test_a_session_may_have_calls_in_parallel(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        first = agent.text(urls[0], "q")
        threads = [
            threading.Thread(target=agent.ask, args=(urls[i % 2], "q", first, f"branch {i}"))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        begun, *branches = gateway.calls()
    assert len(branches) == 8 and {call.continues for call in branches} == {begun.call}


def test_the_same_question_twice_has_two_answers_and_a_retry_has_the_first_ones(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        one = agent.ask(urls[0], "q")
        two = agent.ask(urls[1], "q")
        again = agent.ask(urls[0], "q", **RETRY)
        keyed = [agent.ask(urls[i], "q", **{"idempotency-key": "k"}) for i in (0, 1)]
        assert one["id"] != two["id"] and again == two
        assert keyed[0] == keyed[1] and keyed[0]["id"] not in (one["id"], two["id"])
        assert len(gateway.calls()) == gateway.stub.sampled == 3


def test_a_retry_joins_the_request_in_flight(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        agent = Agent(gateway, url)
        gateway.stub.gate.clear()
        answers = list[dict[str, Any]]()
        threads = [
            threading.Thread(target=lambda h=h: answers.append(agent.ask(url, "q", **h)))
            for h in ({}, RETRY, RETRY)
        ]
        for number, thread in enumerate(threads):
            thread.start()
            if not number:
                until(lambda: gateway.stub.sampled == 1)
        assert not gateway.calls()
        gateway.stub.gate.set()
        for thread in threads:
            thread.join(patience(30))
        assert answers[0] == answers[1] == answers[2]
        assert len(gateway.calls()) == gateway.stub.sampled == 1


def test_of_two_replicas_with_the_same_request_the_first_in_the_log_counts(tmp_path: Path):
    """The first replica is slow, so the agent gives up and asks another one."""
    with gateways(tmp_path) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        gateway.stub.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            agent.send(urls[0], "q", timeout_s=1.0)
        until(lambda: gateway.stub.sampled == 1)
        answers = list[dict[str, Any]]()
        other = threading.Thread(target=lambda: answers.append(agent.ask(urls[1], "q", **RETRY)))
        other.start()
        until(lambda: gateway.stub.sampled == 2)
        gateway.stub.gate.set()
        other.join(patience(30))
        until(lambda: len({call.call for call in gateway.calls()}) == 2)
        first = gateway.calls()[0]
        assert answers[0]["id"] == f"chatcmpl-{first.call}"
        # The answer of the agent that gave up was lost. If it is the first, it is recorded again.
        records = [call for call in gateway.calls() if call.call == first.call]
        assert not records[-1].lost and len(records) == 1 + first.lost
        # The agent continues from the call that counts.
        said = answers[0]["choices"][0]["message"]["content"]
        agent.ask(urls[1], "q", said, "more")
        *earlier, more = gateway.calls()
        assert len(earlier) == 2 + first.lost and more.continues == first.call
        assert gateway.stub.sampled == 3


def test_the_same_question_at_once_on_two_replicas_has_two_answers(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        gateway.stub.gate.clear()
        found = list[str]()
        threads = [
            threading.Thread(target=lambda url=url: found.append(agent.ask(url, "q")["id"]))
            for url in urls
        ]
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda number=number: gateway.stub.sampled == number + 1)
        gateway.stub.gate.set()
        for thread in threads:
            thread.join(patience(30))
        first, _, second = gateway.calls()
    assert sorted(found) == sorted(f"chatcmpl-{call.call}" for call in (first, second))
    assert (first.request.partition("#")[2], second.request.partition("#")[2]) == ("0", "1")


def test_an_agent_that_starts_again_gets_its_answers_again(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        agent = Agent(gateway, url)
        one = agent.text(url, "q")
        other = agent.text(url, "q")  # twice on purpose
        two = agent.text(url, "q", one, "more")
        gateway.stop(url)
        url = gateway.start()
        refused = httpx.post(
            f"{url}/rl/start_session",
            json={"task_id": "7", "session_id": "s0"},
            headers={"authorization": f"Bearer {gateway.key()}"},
            timeout=patience(30),
        )
        assert refused.status_code == 409 and "resume" in refused.text
        again = Agent(gateway, url, resume=True)
        answers = [again.text(url, "q"), again.text(url, "q"), again.text(url, "q", one, "more")]
        assert answers == [one, other, two]
        assert gateway.stub.sampled == len(gateway.calls()) == 3
        again.text(url, "q")
        again.text(url, "q", one, "more", two, "on")
        first, _, second, third, last = gateway.calls()
    assert not third.continues and third.request.endswith("#2")
    assert (second.continues, last.continues) == (first.call, second.call)


def test_an_sdk_that_retries_after_an_error_gets_one_answer(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        opened = gateway.begin(url)
        gateway.stub.mode = "broken"
        api = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=5)
        done = threading.Event()

        def heal() -> None:
            until(lambda: len(gateway.stub.asked) >= 1)
            gateway.stub.mode = "ok"
            done.set()

        threading.Thread(target=heal).start()
        messages: Any = [{"role": "user", "content": "q"}]
        answer = api.chat.completions.create(model="policy", messages=messages)
        assert done.is_set() and answer.choices[0].message.content
        assert len(gateway.calls()) == 1


def test_a_session_that_has_ended_takes_no_call_on_any_replica(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        urls = [gateway.start(), gateway.start()]
        agent = Agent(gateway, urls[0])
        agent.ask(urls[0], "q")
        for url in urls:  # twice is once
            ended = httpx.post(
                f"{url}/rl/end_session", json={"truncation": "steps"}, headers=agent.grading
            )
            assert ended.json() == {"session_id": "s0", "ended": True}
        refused = agent.send(urls[1], "q", "a", "b")
        assert refused.status_code == 409 and "has ended" in refused.text
        body = {"task_id": "7", "session_id": "s0", "resume": True}
        late = gateway.opened(urls[0], body)
        assert late.status_code == 409
        start, _, end = gateway.records()
    assert isinstance(start, SessionStart)
    assert isinstance(end, SessionEnd) and end.truncation == "steps"


def test_an_answer_that_comes_after_the_end_is_refused(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        agent = Agent(gateway, url)
        gateway.stub.gate.clear()
        found = list[httpx.Response]()
        asking = threading.Thread(target=lambda: found.append(agent.send(url, "q")))
        asking.start()
        until(lambda: gateway.stub.sampled == 1)
        ended = httpx.post(f"{url}/rl/end_session", json={}, headers=agent.grading)
        ended.raise_for_status()
        gateway.stub.gate.set()
        asking.join(patience(30))
        assert found[0].status_code == 409
