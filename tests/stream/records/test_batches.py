"""A group, a batch or scores whose arrays do not fit each other cannot be made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.assemble import assemble
from streamrl.stream.records import Scores, mean_rewards
from tests.support.build import floats, group


def test_every_column_of_a_group_fits_its_sequences():
    record = group(sizes=(1, 2))
    assert record.total_tokens == 2 * len(record.prompt) + 3
    with pytest.raises(ValueError, match=r"rewards has shape \[1\], expected \[2\]"):
        structs.replace(record, rewards=floats(1))
    with pytest.raises(ValueError, match="advantages: value 1 is not finite"):
        structs.replace(record, advantages=floats(1, np.inf))


def test_the_rows_of_a_batch_are_divided_among_its_processes():
    batch = assemble([group(sizes=(1, 2))], 3, 3, row_count=2, max_seq_len=10)
    assert batch is not None
    with pytest.raises(ValueError, match="batch 3: 2 rows cannot be divided among 3 processes"):
        structs.replace(batch, processes=3)
    with pytest.raises(ValueError, match="batch 3: prompts has shape"):
        structs.replace(batch, prompts=batch.prompts[1:])


def test_a_rollout_that_forked_counts_once_in_the_mean_reward():
    """Rewards 0 and 1, the second rollout in two sequences."""
    forked = structs.replace(group(sizes=(1, 1, 1)), uids=["a", "b", "b"], rewards=floats(0, 1, 1))
    batch = assemble([forked, group("add", reward=0.25)], 0, 0, row_count=4, max_seq_len=10)
    assert batch is not None and mean_rewards(batch) == {"add": 0.25, "copy": 0.5}


def test_experts_of_prompts_have_the_layers_of_those_of_tokens():
    record = group(sizes=(1, 2))
    experts = np.ones((3, 2, 1), np.uint8)
    prompt = np.ones((len(record.prompt), 1, 1), np.uint8)
    with pytest.raises(ValueError, match="prompt_routed_experts do not fit routed_experts"):
        structs.replace(record, routed_experts=experts, prompt_routed_experts=prompt)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprobs": floats(-1, np.nan)}, "scores of batch 3: logprobs: value 1 is not finite"),
        ({"teacher_logprobs": floats(-1)}, r"teacher_logprobs has shape \[1\], expected \[2\]"),
    ],
)
def test_scores_that_cannot_be_are_refused(fields: dict[str, Any], says: str):
    scores = Scores(number=3, scorer="scorer-0", reference=0, logprobs=floats(-1, -2))
    with pytest.raises(ValueError, match=says):
        structs.replace(scores, **fields)


def test_a_sequence_of_no_group_is_of_no_env():
    batch = assemble([group(sizes=(1, 2), reward=1.0)], 3, 3, row_count=2, max_seq_len=10)
    assert batch is not None
    for groups in ([0, 1], [-1, 0]):
        changed = structs.replace(batch, groups=np.array(groups, np.int32))
        assert mean_rewards(changed) == {"copy": mean_rewards(batch)["copy"]}


REAL = np.array([np.inf, 1], np.float32)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lengths": REAL}, r"lengths are float32\[2\], not a list of integers"),
        ({"lengths": np.array([-3, 6], np.int32)}, "lengths: one is -3, not 0 to 2147483647"),
        ({"oldest_versions": REAL}, "oldest_versions must be like <i4, not float32"),
        ({"offsets": REAL}, "offsets must be like <i8, not float32"),
        ({"prompt": REAL}, "the prompt must be one-dimensional and unsigned"),
        ({"rewards": floats(1, np.nan)}, "rewards: value 1 is not finite"),
    ],
)
def test_a_group_has_columns_of_the_kinds_that_it_declares(fields: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        structs.replace(group(sizes=(1, 2)), **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rows": floats(0, 1)}, "rows must be like <i4, not float32"),
        ({"prompt_lengths": floats(2)}, r"prompt_lengths must be like <i4, not float32"),
        ({"lengths": REAL}, "lengths are float32"),
        ({"prompts": floats(1, 2)}, "prompts must be one-dimensional and unsigned"),
    ],
)
def test_a_batch_has_columns_of_the_kinds_that_it_declares(fields: dict[str, Any], says: str):
    batch = assemble([group(sizes=(1, 2))], 3, 3, row_count=2, max_seq_len=10)
    assert batch is not None
    with pytest.raises(ValueError, match=says):
        structs.replace(batch, **fields)
