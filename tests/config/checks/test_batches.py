from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.system.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "batcher.max_seq_len=1536",
            "in blocks of 1024 tokens; give a multiple of it, such as 2048",
        ),
        (
            "learner={attention: cudnn, mesh: {context: 2}}",
            "learner.attention cudnn needs whole rows, and learner.mesh.context divides them",
        ),
        ("batcher.row_lengths=[32, 64]", "row_lengths: 64 is not below max_seq_len 64"),
        ("batcher.row_lengths=[32, 32]", "32]: each length once"),
        (
            "batcher={max_seq_len: 4096, row_lengths: [1536]}",
            "row_lengths: 1536: attention is computed in blocks of 1024",
        ),
        (
            "batcher.total_token_budget=90000000",
            "90000000: a record holds a batch of at most 85333333 tokens",
        ),
        ("batcher.lookahead=4", "need 0 <= lookahead <= max_age"),
        ("buffer.min_group_size=9", "larger than buffer.group_size 8"),
        (
            "buffer.max_window_tokens=100",
            "100 does not hold a group of 8 rollouts of model.max_seq_len 64 tokens",
        ),
        (
            "buffer.min_group_size=1",
            (
                "rloo compares the rollouts of a group, so one alone has advantage 0 and only fills"
                " the batch; set it to 2"
            ),
        ),
        (
            "batcher={total_token_budget: 6, max_seq_len: 64}",
            "total_token_budget 6 holds no group of 4 rollouts",
        ),
        ("batcher.row_count=2", "less than total_token_budget"),
        ("model.max_seq_len=128", "could not be packed"),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [override])


def test_a_group_that_could_fit_the_budget_and_not_the_rows_is_named():
    """Twelve answers of 1,025 tokens are 12,300: within the budget, and no two of them fit into one
    of the ten rows of 2,048.
    """
    changes = [
        "batcher={}",
        "model.max_seq_len=2048",
        "inference.max_model_len=2048",
        "buffer={group_size: 12}",
    ]
    with pytest.raises(
        ConfigError,
        match=(
            "12 rollouts of 1025 tokens need a row of 2048 each, and there are 10: .*; set it to 12"
        ),
    ):
        run_file.load(QUICKSTART, changes)
    assert run_file.load(QUICKSTART, [*changes, "batcher.row_count=12"]).batcher.rows == 12


def test_a_group_that_no_record_holds_is_named():
    changes = ["model.max_seq_len=3000000", "buffer.max_window_tokens=100000000"]
    with pytest.raises(
        ConfigError,
        match=r"envs.copy-digits: 8 rollouts \(group_size\) of 3000000 tokens \(model.max_seq_len\)"
        " are more than the 21333333 tokens of a group that a record holds",
    ):
        run_file.load(QUICKSTART, changes)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            "{group_size: 3}",
            (
                "envs.add-digits.buffer.min_group_size 4 is larger than"
                " envs.add-digits.buffer.group_size 3"
            ),
        ),
        ("{max_age: 0}", "batcher.lookahead is 1 but envs.add-digits.buffer.max_age is 0"),
        ("{advantage: reinforce++}", "of the envs' advantages some need normalize and some none"),
        (
            "{groups_size: 3}",
            "unknown key 'envs.add-digits.buffer.groups_size'; did you mean 'group_size'",
        ),
    ],
)
def test_rules_of_an_env_that_cannot_work_are_named(own: str, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_file.load(QUICKSTART, [f"envs.add-digits.buffer={own}"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["batcher.processes=34"],
            (
                "2560 does not give every process a rollout for certain: 34 processes and groups of"
                " 8 .* of 64 tokens need 2624"
            ),
        ),
        (
            ["batcher.processes=4", "batcher.row_count=45"],
            "batcher.row_count 45 cannot be divided among batcher.processes 4",
        ),
        (
            ["batcher.balance=flops", "model.path=elsewhere"],
            "batcher.balance flops needs model.hidden: hidden_size in elsewhere/config.json",
        ),
    ],
)
def test_a_division_that_cannot_work_is_named(overrides: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, overrides)


def test_demonstrations_need_no_peers():
    """Without a policy gradient nobody reads their advantages."""
    alone = {"group_size": 1, "min_group_size": 1}
    imitated = {"policy_gradient": 0, "cross_entropy": 1}
    data = {"run": "r", "envs": {"copy-digits": {}, "shown": {"replicas": 0, "buffer": alone}}}
    with pytest.raises(ConfigError, match=r"envs\.shown\.buffer\.min_group_size is 1"):
        run_file.parse(data)
    data["envs"]["shown"]["loss"] = imitated
    assert run_file.parse(data).envs["shown"].loss.cross_entropy == 1
