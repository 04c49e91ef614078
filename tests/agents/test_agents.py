"""Agents of other people's SDKs are trained, and sessions survive kills: the commands of
docs/train-your-agent.md, shorter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents import env_kills
from tests.agents.chaos import killed
from tests.agents.practice import AGENTS, MISMATCH, trained


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
