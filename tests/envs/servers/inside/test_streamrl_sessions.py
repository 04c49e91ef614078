"""An env server as a process of its own, on the real gateway."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from streamrl.envs.servers.process import INSIDE
from streamrl.stream.records import Reward
from streamrl.system.errors import StreamrlError
from tests.support.env_servers import (
    EnvServer,
    ends,
    gateway_of,
    of_kind,
    problems_ended,
    run_of,
    starts,
)
from tests.support.modules import module_of
from tests.support.waiting import until

ROOT = Path(__file__).parents[4]
COUNTING = str(Path(__file__).parents[1] / "counting.py")
sessions: Any = module_of(INSIDE / "streamrl_sessions.py")


def test_sessions_are_grouped_rewarded_and_ended_and_what_made_them_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    monkeypatch.setenv("JUDGE_KEY", "for the env")
    run = run_of(
        tmp_path,
        COUNTING,
        sys.executable,
        sessions={"rewards": ["right", "brief"]},
        rollout_timeout_s=1.0,
        variables=["JUDGE_KEY"],
    )
    with gateway_of(run, lambda prompt, choice: "four") as gateway:
        server = EnvServer(run, gateway)
        until(lambda: problems_ended(gateway) == {"0", "1", "2"})
        server.stop()
        assert server.ended is None
        begun = starts(gateway)
        ended = ends(gateway)
        rewards = of_kind(gateway, Reward)
    by_problem = {begun[name].problem_id: end for name, end in ended.items()}
    assert (by_problem["0"].failure, by_problem["0"].truncation) == ("", "turns")
    assert by_problem["1"].failure == "ValueError: no such number"
    assert by_problem["2"].failure == "it took longer than 1 s"
    given = {(each.name, each.value) for each in rewards if isinstance(each, Reward)}
    assert given == {("right", 1.0), ("brief", 0.25)}
    groups = [each.group_id for each in begun.values()]
    assert max(map(groups.count, groups)) == 2
    source = next(iter(begun.values())).metadata
    assert source["package"] == "counting" and source["server"] == "env-agent-0"
    assert "JUDGE_KEY" in source["variables"] and "KAFKA_PASSWORD" not in source["variables"]


def test_a_server_that_is_killed_ends_the_part_and_its_sessions_fail(tmp_path: Path):
    run = run_of(tmp_path, COUNTING, sys.executable, max_groups_in_flight=2)
    with gateway_of(run, lambda prompt, choice: "four") as gateway:
        gateway.stub.gate.clear()  # so that sessions are open
        first = EnvServer(run, gateway)
        until(lambda: len(starts(gateway)) >= 3)
        pid = int(next(iter(starts(gateway).values())).metadata["pid"])
        os.kill(pid, signal.SIGKILL)
        ended = first.wait()
        assert isinstance(ended, StreamrlError) and "its server has ended" in str(ended)
        left = set(starts(gateway)) - set(ends(gateway))
        assert left
        gateway.stub.gate.set()
        second = EnvServer(run, gateway)
        until(lambda: left <= set(ends(gateway)))
        second.stop()
        causes = {ends(gateway)[name].failure for name in left}
        others = {end.failure for name, end in ends(gateway).items() if name not in left}
    assert causes == {sessions.LEFT}
    assert sessions.LEFT not in others


def test_the_program_that_the_page_names_runs(tmp_path: Path):
    example = ROOT / "examples" / "env_server.py"
    run = run_of(tmp_path, str(example), sys.executable)
    with gateway_of(run, lambda prompt, choice: "four") as gateway:
        server = EnvServer(run, gateway)
        until(lambda: len(of_kind(gateway, Reward)) >= 20)
        server.stop()
        begun = starts(gateway)
        given = of_kind(gateway, Reward)
    for reward in given:
        assert isinstance(reward, Reward) and reward.name == "reward"
        problem = int(begun[reward.rollout].problem_id)
        assert reward.value == (problem % 10 == 3)


def settings(**changes: Any) -> Any:
    values = {
        "env": "e",
        "server": "env-e-0",
        "target": "",
        "params": {},
        "seed": 0,
        "index": 0,
        "servers": 1,
        "group_size": 2,
        "max_sessions": 4,
        "session_limit_s": 1.0,
        "rewards": [],
        "gateway": "http://127.0.0.1:1",
    }
    return sessions.Settings(**{**values, **changes})


def test_servers_share_out_the_problems_and_each_comes_once_an_epoch():
    first = list(islice(sessions.problems(10, settings(index=0, servers=3), "a"), 8))
    second = list(islice(sessions.problems(10, settings(index=2, servers=3), "a"), 6))
    assert sorted(first[:4]) == sorted(first[4:]) == [0, 3, 6, 9] and first[:4] != first[4:]
    assert sorted(second[:3]) == sorted(second[3:]) == [2, 5, 8]
    assert list(islice(sessions.problems(0, settings(index=1, servers=2), "a"), 3)) == [1, 3, 5]
    with pytest.raises(SystemExit, match="1 problems are too few for 3 servers"):
        next(sessions.problems(1, settings(index=2, servers=3), "a"))


def test_a_process_that_follows_goes_through_them_in_another_order():
    orders = [list(islice(sessions.problems(50, settings(), begun), 50)) for begun in "ab"]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", 10**400])
@pytest.mark.parametrize("names", [[], ["a"]])
def test_a_reward_that_is_no_number_fails_its_session_and_no_other(value: Any, names: list[str]):
    """The gateway would refuse it, and the server would end."""
    with pytest.raises(sessions.Failed, match="'a' is .*, which is no finite number"):
        sessions.chosen({"a": value}, names)


def test_rewards_may_be_any_numbers_but_not_too_many():
    (value,) = sessions.chosen({"a": np.float32(0.5)}, ["a"]).values()
    assert json.dumps(value) == "0.5"
    with pytest.raises(sessions.Failed, match="the sum of all"):
        sessions.chosen({"a": 1.7e308, "b": 1.7e308}, [])


class Strict:
    """A gateway that takes texts of UTF-8 only, and notes how sessions end."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any], key: str = "") -> None:
        json.dumps(body, ensure_ascii=False).encode()
        self.ends.append(body)


class Playing:
    """An env whose sessions end in a given way."""

    def __init__(self, end: Any) -> None:
        self.end = end

    async def play(self, problem: int, session: Any) -> Any:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        (ValueError("the tool wrote \udcff"), "ValueError: the tool wrote ?"),
        (sessions.Outcome({"a": 1.0}, truncation=True), "truncation is True; it names the limit"),
    ],
)
def test_whatever_ends_a_session_is_said_so_that_the_gateway_takes_it(end: Any, failure: str):
    gateway = Strict()
    server = sessions.SessionServer(settings(), gateway)
    session = sessions.Session("s", "key", "", "")
    asyncio.run(server._play(Playing(end), 0, session, "grading key"))
    (said,) = gateway.ends
    assert said["failure"].startswith(failure)


def test_a_gateway_that_is_gone_amid_its_answer_is_asked_again():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            for text in ("{", '{"ok": true}'):
                connection, _ = listener.accept()
                with connection:
                    while not connection.recv(65_536).endswith(b"}"):
                        pass
                    head = "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n"
                    connection.sendall((head + text).encode())

        answering = Thread(target=answer)
        answering.start()
        found = asyncio.run(sessions.GatewayClient(url, "").post("/rl/end_session", {"a": {}}))
        answering.join()
    assert found == {"ok": True}


def test_a_reward_that_is_waited_for_has_to_be_there():
    assert sessions.chosen({"a": 1.0, "b": 0.5}, []) == {"reward": 1.5}
    assert sessions.chosen({"a": 1.0, "b": 0.5}, ["b"]) == {"b": 0.5}
    with pytest.raises(sessions.Failed, match=r"no reward 'c' \(sessions.rewards\); there are a"):
        sessions.chosen({"a": 1.0}, ["c"])
