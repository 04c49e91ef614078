"""The tables of `make rewards`: each answer earns what it has to."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.envs.catalog import ENVS
from streamrl.envs.catalog import REWARDS as SHIPPED
from streamrl.envs.shipped.dataset import DATASET_REWARDS
from tests.rewards.tables import CUT_OFF, EACH, REWARD_TABLES, TABLES, earned, is_as_wanted, rows_of

# Envs whose rewards are those of another table, or of no answer.
ELSEWHERE = {
    "copy-digits": "positions",
    "add-digits": "positions",
    "dataset": "exact",
    "demonstrations": "",
}


@pytest.mark.parametrize("name", REWARD_TABLES)
async def test_each_answer_earns_what_it_has_to(name: str, tmp_path: Path):
    rows = rows_of(name)
    rewards = await earned(name, rows, tmp_path)
    wrong = [
        (row, reward)
        for row, reward in zip(rows, rewards, strict=True)
        if not is_as_wanted(name, row, reward)
    ]
    assert not wrong


@pytest.mark.parametrize("name", REWARD_TABLES)
def test_a_table_has_as_many_right_answers_as_wrong_ones(name: str):
    groups = [row.group for row in rows_of(name)]
    assert groups.count("right") == groups.count("wrong") == EACH
    assert CUT_OFF in groups
    texts = [str(row.fields) for row in rows_of(name) if row.group != CUT_OFF]
    assert len({*texts}) >= 2 * EACH


def test_every_shipped_reward_has_a_table():
    names = {*ENVS, *SHIPPED, *DATASET_REWARDS} - {*ELSEWHERE, "none"}
    assert names == {*REWARD_TABLES} == {path.stem for path in TABLES.glob("*.yaml")}
