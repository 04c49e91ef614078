"""Tasksets of verifiers as env servers: what an episode earns, and that it is what the library
itself computes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.envs.servers.process import INSIDE
from streamrl.stream.records import ModelCall, Reward
from tests.envs.servers.answers import from_prompt
from tests.support.env_servers import EnvServer, ends, gateway_of, of_kind, run_of, starts
from tests.support.modules import module_of
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[4]
TASKSET = ROOT / "examples" / "verifiers_taskset.py"
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.mark.slow
def test_rewards_are_those_of_the_library_itself(tmp_path: Path):
    """The same tasks through a session each, and by the library without streamrl."""
    run = run_of(
        tmp_path,
        f"verifiers:{TASKSET}",
        str(PYTHON),
        params=LOCAL,
        sessions={"rewards": ["right", "brief"]},
    )
    with gateway_of(run, from_prompt) as gateway:
        server = EnvServer(run, gateway)
        until(lambda: len(ends(gateway)) >= 200, 240)
        server.stop()
        begun = starts(gateway)
        ended = ends(gateway)
        calls = of_kind(gateway, ModelCall)
        given = of_kind(gateway, Reward)
    earned = dict.fromkeys(ended, 0.0)
    for reward in given:
        if isinstance(reward, Reward) and reward.rollout in earned:
            earned[reward.rollout] += reward.value
    direct = subprocess.run(
        [PYTHON, Path(__file__).parents[1] / "direct.py", TASKSET, "0", "100"],
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=True,
    )
    by_task = {int(task): reward for task, reward in json.loads(direct.stdout).items()}
    assert {end.failure for end in ended.values()} == {""}
    assert earned == {name: by_task[int(begun[name].problem_id)] for name in ended}
    assert len(set(earned.values())) > 2
    by_session = [[c for c in calls if c.session == name] for name in ended]
    assert all([call.continues for call in of][:1] == [""] and len(of) == 2 for of in by_session)
    assert all(second.continues == first.call for first, second in by_session)
    source = next(iter(begun.values())).metadata
    assert (source["package"], source["taskset"]) == ("verifiers", "verifiers_taskset")
    assert source["version"].startswith("0.4") and len(source["taskset_version"]) == 12


class Client:
    """As `EvalClient` of the library, with its headers."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def _headers(self, dialect: Any, incoming: Any, session_id: str | None) -> dict[str, str]:
        return {"authorization": "Bearer none", "x-session-id": session_id or ""}


class ProviderError(Exception):
    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, in a Python without the library."""
    clients = SimpleNamespace(
        EvalClient=Client, EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace
    )
    loaders = SimpleNamespace(import_taskset=None, load_environment=None, resolve_env_config=None)
    monkeypatch.syspath_prepend(str(INSIDE))
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", clients)
    monkeypatch.setitem(
        sys.modules, "verifiers.v1.errors", SimpleNamespace(ProviderError=ProviderError)
    )
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", loaders)
    return module_of(INSIDE / "streamrl_verifiers.py")


def trace_of(**changes: Any) -> Any:
    reward = SimpleNamespace(value=0.5)
    values = {
        "agent": SimpleNamespace(trainable=True),
        "errors": [],
        "rewards": {"right": reward, "brief": SimpleNamespace(value=0.25)},
        "stop_condition": "agent_completed",
        "is_timeout": False,
    }
    return SimpleNamespace(**{**values, **changes})


def episode_of(*traces: Any, ok: bool = True, errors: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(ok=ok, errors=list(errors), traces=list(traces), is_timeout=False)


def test_an_episode_earns_the_rewards_of_the_agent_that_trains(adapter: Any):
    judge = trace_of(agent=SimpleNamespace(trainable=False), rewards={})
    found = adapter.outcome(episode_of(judge, trace_of()))
    assert found.rewards == {"right": 0.5, "brief": 0.25} and found.truncation == ""


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"stop_condition": "max_turns"}, "turns"),
        ({"stop_condition": "max_total_tokens"}, "context"),
        ({"stop_condition": "agent_timeout", "is_timeout": True}, "time"),
    ],
)
def test_a_limit_that_has_ended_it_is_said(adapter: Any, changes: dict[str, Any], limit: str):
    assert adapter.outcome(episode_of(trace_of(**changes))).truncation == limit


def test_an_episode_that_failed_earns_nothing(adapter: Any):
    error = SimpleNamespace(type="TaskError", message="reward right: ZeroDivisionError")
    failed = episode_of(trace_of(errors=[error]), ok=False)
    with pytest.raises(adapter.Failed, match="TaskError: reward right: ZeroDivisionError"):
        adapter.outcome(failed)
    with pytest.raises(adapter.Failed, match="'brief' was not computed"):
        adapter.outcome(episode_of(trace_of(rewards={"brief": None})))


def test_an_agent_that_does_not_train_cannot_ask_the_policy(adapter: Any):
    config = adapter.EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="none")
    client = adapter.SessionClient(config)
    client.keys["trace"] = "sk-mine"
    dialect = SimpleNamespace(auth_headers=lambda key: {"authorization": f"Bearer {key}"})
    assert client._headers(dialect, {}, "trace") == {
        "authorization": "Bearer sk-mine",
        "x-session-id": "trace",
    }
    with pytest.raises(ProviderError, match="give it a client of its own") as refused:
        client._headers(dialect, {}, "another")
    assert refused.value.status_code == 400
