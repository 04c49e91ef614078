from streamrl.buffer.staleness import expires_next, is_fresh, max_future_versions, staleness


def test_age_counts_from_the_oldest_token():
    assert staleness(batch=5, oldest_version=3) == 2


def test_max_age_1_lookahead_1_batches_0_and_1_may_use_version_0_batch_2_may_not():
    assert [is_fresh(batch, 0, max_age=1) for batch in (0, 1, 2)] == [True, True, False]


def test_max_age_1_lookahead_0_batch_2_may_use_versions_1_and_2():
    assert [is_fresh(2, version, max_age=1) for version in (0, 1, 2)] == [False, True, True]


def test_last_chance_is_the_version_before_it_is_too_old():
    assert [expires_next(announced, 0, max_age=1) for announced in (0, 1)] == [False, True]


def test_a_deeper_pipeline_may_run_further_ahead_of_what_the_buffer_has_heard():
    assert [max_future_versions(lookahead) for lookahead in (0, 1, 2, 24)] == [8, 8, 10, 54]
