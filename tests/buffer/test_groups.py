import numpy as np

from streamrl.buffer.advantages import rloo
from streamrl.buffer.groups import score_group
from streamrl.stream.records import Turn
from streamrl.stream.records.sequences import sampled_indices
from tests.support.build import floats, rollout, rollout_event, tokens, turns


def test_the_shared_prompt_is_kept_once():
    events = [
        rollout_event(i, rollout(sample=i, reward=float(i), turns=turns(response=range(3, 4 + i))))
        for i in range(3)
    ]
    record = score_group(events, rloo)
    assert record.prompt.tolist() == [1, 2]
    assert record.lengths.tolist() == [1, 2, 3]
    assert record.tokens.tolist() == [3, 3, 4, 3, 4, 5]
    assert record.span_counts is None
    np.testing.assert_allclose(record.advantages, [-1.5, 0, 1.5])
    assert record.offsets.tolist() == [0, 1, 2]
    assert record.total_tokens == 3 * 2 + 6


def test_what_the_policy_did_not_sample_is_masked():
    user = Turn(message="no", role="user", tokens=tokens(8, 9))
    answer = Turn(message="5", role="assistant", tokens=tokens(5), logprobs=floats(-0.25))
    record = score_group(
        [rollout_event(0, rollout(turns=[*turns(response=[3]), user, answer]))], rloo
    )
    assert record.tokens.tolist() == [3, 8, 9, 5]
    assert sampled_indices(record).tolist() == [0, 3]
    assert record.policy_logprobs.tolist() == [-0.5, -0.25]


def test_only_what_all_prompts_begin_with_is_shared():
    events = [
        rollout_event(0, rollout(sample=0, turns=turns(prompt=[1, 2, 7]))),
        rollout_event(1, rollout(sample=1, turns=turns(prompt=[1, 2, 9]))),
    ]
    record = score_group(events, rloo)
    assert record.prompt.tolist() == [1, 2]
    assert record.tokens.tolist() == [7, 3, 4, 5, 9, 3, 4, 5]
    assert sampled_indices(record).tolist() == [1, 2, 3, 5, 6, 7]
