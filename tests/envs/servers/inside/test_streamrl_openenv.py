"""A server of OpenEnv, asked over its WebSocket: rewards are those of the env itself, and a server
that dies in the middle is a failed rollout.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.envs.servers.process import INSIDE
from streamrl.stream.records import ModelCall, Reward
from tests.envs.servers.answers import said
from tests.support.env_servers import EnvServer, ends, gateway_of, of_kind, run_of, starts
from tests.support.gateways import Gateways
from tests.support.modules import module_of
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
PROGRAMS = Path(__file__).parents[1]
EPISODES = 40


def guess(prompt: str, choice: int) -> str:
    """The policy's guess: a function of the sum that it is asked for, and of the turn."""
    (question,) = re.findall(r"\d+\+\d+=", prompt)
    return said(question, prompt.count("<user>"))


@contextmanager
def openenv(dies_after: int = 0) -> Iterator[str]:
    """The address of a server, which ends after so many steps."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = PROGRAMS / "openenv_server.py"
    process = subprocess.Popen([PYTHON, program, str(port), str(dies_after)])
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    try:
        until(answers, 60)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def served(directory: Path, url: str) -> Iterator[Gateways]:
    """A run whose env has these episodes, and its gateway."""
    resets = [{"number": number} for number in range(EPISODES)]
    run = run_of(
        directory,
        f"openenv:{url}",
        str(PYTHON),
        params={"resets": resets, "text": "text"},
        max_groups_in_flight=4,
    )
    with gateway_of(run, guess) as gateway:
        server = EnvServer(run, gateway)
        try:
            yield gateway
        finally:
            server.stop()


def direct() -> list[float]:
    """The rewards of the env itself."""
    played = subprocess.run(
        [PYTHON, PROGRAMS / "direct_openenv.py", str(EPISODES)],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=True,
    )
    return json.loads(played.stdout)


def earned(gateway: Gateways) -> dict[str, float]:
    """The reward of each session that has one."""
    records = of_kind(gateway, Reward)
    return {each.rollout: each.value for each in records if isinstance(each, Reward)}


class Counting:
    """A client of OpenEnv, whose env gives 1 for each of three answers."""

    def __init__(self, base_url: str) -> None:
        self.steps = 0

    async def __aenter__(self) -> Counting:
        return self

    async def __aexit__(self, *raised: object) -> None: ...

    async def reset(self, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(observation={}, reward=None, done=False)

    async def step(self, action: dict[str, Any]) -> SimpleNamespace:
        self.steps += 1
        return SimpleNamespace(observation={}, reward=1.0, done=self.steps == 3)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, in a Python without the library."""
    monkeypatch.syspath_prepend(INSIDE)
    monkeypatch.setitem(sys.modules, "openenv", SimpleNamespace(GenericEnvClient=Counting))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    module = module_of(INSIDE / "streamrl_openenv.py")
    monkeypatch.setattr(module, "fetch", lambda url: {"action": {"required": ["text"]}})
    return module


class Refusing:
    """A gateway that refuses the calls of a session from one on."""

    def __init__(self, refused: int, error: Exception) -> None:
        self.asked = 0
        self.refused = refused
        self.error = error

    async def ask(self, path: str, body: Any, key: str, limit_s: float) -> dict[str, Any]:
        self.asked += 1
        if self.asked >= self.refused:
            raise self.error
        return {"choices": [{"message": {"content": "an answer"}}]}


@pytest.mark.parametrize(("refused", "expected"), [(3, (2.0, "context")), (9, (3.0, ""))])
def test_an_episode_that_the_context_has_no_room_for_ends_truncated(
    program: Any, refused: int, expected: tuple[float, str]
):
    error = program.GatewayRefused('400 {"code": "context_length_exceeded"}')
    env = program.OpenEnv("http://e", Refusing(refused, error))
    outcome = asyncio.run(env.play(0, SimpleNamespace(api_key="k")))
    assert (outcome.rewards["reward"], outcome.truncation) == expected


@pytest.mark.parametrize(("refused", "why"), [(1, "no reward"), (2, "no such")])
def test_an_episode_without_a_reward_or_a_gateway_fails(program: Any, refused: int, why: str):
    said = "context_length_exceeded" if refused == 1 else "404 no such session"
    env = program.OpenEnv("http://e", Refusing(refused, program.GatewayRefused(said)))
    with pytest.raises(program.Failed, match=why):
        asyncio.run(env.play(0, SimpleNamespace(api_key="k")))


@pytest.mark.parametrize("answer", ["[" * 100_000, "9" * 5_000, "go"])
def test_whatever_a_policy_says_is_an_action(program: Any, answer: str):
    assert program.action_of(answer, {"required": ["text"]}) == {"text": answer}


@pytest.mark.slow
def test_rewards_are_those_of_the_env_itself(tmp_path: Path):
    with openenv() as url, served(tmp_path, url) as gateway:
        until(lambda: len(ends(gateway)) >= 2 * EPISODES, 240)
        ended = ends(gateway)
        begun = starts(gateway)
        rewards = earned(gateway)
        calls = of_kind(gateway, ModelCall)
    wanted = direct()
    assert len(set(wanted)) > 4
    assert {end.failure for end in ended.values()} == {""}
    assert {name: rewards[name] for name in ended} == {
        name: wanted[int(begun[name].problem_id)] for name in ended
    }
    for name in ended:
        first, second = (call for call in calls if call.session == name)
        assert (first.continues, second.continues) == ("", first.call)
    source = next(iter(begun.values())).metadata
    assert source["package"] == "openenv-core" and source["version"].startswith("0.")
    assert source["env"] == "Guessing"


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_is_a_failed_rollout(tmp_path: Path):
    with openenv(dies_after=31) as url, served(tmp_path, url) as gateway:
        until(lambda: any(end.failure for end in ends(gateway).values()), 240)
        until(lambda: sum(bool(end.failure) for end in ends(gateway).values()) >= 3, 120)
        ended = ends(gateway)
        begun = starts(gateway)
        rewards = earned(gateway)
        calls = of_kind(gateway, ModelCall)
    wanted = direct()
    failed = {name for name, end in ended.items() if end.failure}
    assert not failed & rewards.keys()
    assert any(call.session in failed for call in calls)  # in the middle of it
    whole = ended.keys() - failed
    assert whole and {name: rewards[name] for name in whole} == {
        name: wanted[int(begun[name].problem_id)] for name in whole
    }
