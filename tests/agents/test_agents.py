"""Agents of other people's SDKs are trained, and sessions survive kills: the commands of
docs/train-your-agent.md, shorter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.stream.records import Reward, SessionEnd, SessionStart
from tests.agents import env_kills
from tests.agents.chaos import killed
from tests.agents.practice import AGENTS, MISMATCH, trained
from tests.support.gateways import gateways
from tests.support.modules import module_of

ROOT = Path(__file__).parents[2]


def test_the_agent_that_the_page_names_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    example = ROOT / "examples" / "agents" / "first.py"
    with gateways(tmp_path, lambda prompt, choice: "6") as gateway:
        monkeypatch.setenv("STREAMRL_GATEWAY_KEY", gateway.key())
        first: Any = module_of(example)
        first.GATEWAY = gateway.start()
        first.practise(3)
        first.practise(4)
        gateway.stub.mode = "refuse"
        first.practise(5)
        ends = [record for record in gateway.records() if isinstance(record, SessionEnd)]
        rewards = [record for record in gateway.records() if isinstance(record, Reward)]
        starts = {
            record.session: record.problem_id
            for record in gateway.records()
            if isinstance(record, SessionStart)
        }
    assert {starts[r.rollout]: r.value for r in rewards if isinstance(r, Reward)} == {
        "3": 1.0,
        "4": 0.0,
    }
    failures = {starts[end.session]: end.failure for end in ends}
    assert failures["3"] == failures["4"] == "" and "BadRequestError" in failures["5"]


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_learns_and_no_call_of_it_is_lost(tmp_path: Path, agent: str):
    account = trained(agent, tmp_path)
    assert account.is_clean, account
    assert account.end > account.start
    assert account.mismatch <= MISMATCH


@pytest.mark.slow
def test_kills_lose_and_double_nothing(tmp_path: Path):
    result = killed(tmp_path, kills=20, seed=1)
    assert result.is_clean, result


@pytest.mark.slow
def test_kills_of_an_env_lose_an_answer_of_each_conversation_at_most(tmp_path: Path):
    result = env_kills.killed(tmp_path, kills=4, seed=1)
    assert result.is_clean, result
    assert result.kept_s > result.lost_s
