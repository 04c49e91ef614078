"""What the run of the clients makes of its groups and its batch, worked by hand."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from streamrl.batcher.assemble import assemble
from streamrl.config import run_file
from tests.agents.chaos import ENV
from tests.clients.live_run import Trained, batch_of, by_session, for_batch, with_all_parts
from tests.support.batcher import forked
from tests.support.build import floats, group, spans

# A session that has forked, of 5 and 6 tokens with its prompt, and one of 4.
GROUPS = [forked("a", sizes=(3, 4), of=(0, 0)), group(name="b", sizes=(2,))]


def test_a_batch_has_the_shortest_rows_that_hold_the_longest_sequence_and_as_few_as_hold_all():
    assert batch_of(GROUPS) == {"total_token_budget": 15, "max_seq_len": 1_024, "row_count": 1}
    long = [group(name="c", sizes=(700,)), group(name="d", sizes=(500, 300))]
    assert batch_of(long) == {"total_token_budget": 1_506, "max_seq_len": 1_024, "row_count": 2}


def test_the_run_file_and_the_batchers_own_are_valid():
    settings = with_all_parts({"envs": {ENV: {"sessions": {}}}}, Path("model"))
    assert run_file.parse(settings).learner.precision == "float32"
    assert run_file.parse(for_batch(settings, GROUPS)).batcher.total_token_budget == 15


def test_logprobs_are_compared_at_the_trained_tokens_of_each_session():
    first = structs.replace(
        GROUPS[0], **spans([0, 1, 1], [0, 0, 0, 1]), policy_logprobs=floats(-1, -1, -1)
    )
    masked = [first, GROUPS[1]]
    batch = assemble(masked, number=0, policy_version=0, row_count=2, max_seq_len=10)
    assert batch is not None
    expected = batch.policy_logprobs + floats(1, -2, 0, 0.5, 0.25)
    assert by_session(batch, expected) == {
        "a-0": Trained(tokens=3, mean=1.0, max=2.0),
        "b-0": Trained(tokens=2, mean=0.375, max=0.5),
    }
