import numpy as np

from streamrl.batcher.masks import predictions
from tests.build import floats


def test_the_worked_example_of_document_000():
    # "What is 2+2?" is 7 tokens, "4" one; the arrays hold 8 positions, the last of which predicts nothing
    within, sampled, logprobs = np.arange(8), floats(0, 0, 0, 0, 0, 0, 0, 1), floats(0, 0, 0, 0, 0, 0, 0, -0.002)
    mask, policy = predictions(within, sampled, [logprobs])
    assert mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    np.testing.assert_allclose(policy, [0, 0, 0, 0, 0, 0, -0.002, 0])


def test_the_first_token_of_a_rollout_is_not_predicted_by_the_one_before_it():
    within, sampled = np.array([0, 1, 0, 1, 2]), floats(0, 1, 1, 1, 1)
    assert predictions(within, sampled, ())[0].tolist() == [1, 0, 1, 1, 0]


def test_nothing_gives_nothing():
    assert predictions(np.zeros(0, int), floats(), ())[0].tolist() == []
