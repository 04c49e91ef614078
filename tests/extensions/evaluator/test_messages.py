from __future__ import annotations

import numpy as np

from streamrl.extensions.evaluator.messages import deleted_line, result_line
from streamrl.stream.records import Evaluation, PassAt


def test_the_first_deleted_versions_are_named_and_the_others_counted():
    assert deleted_line([2, 4]).startswith(
        "not evaluated, as the weights are deleted: version 2, 4; raise weights.keep_versions"
    )
    assert "version 0, 2, 4, 6, 8; raise" in deleted_line(range(0, 10, 2))
    assert "version 0, 2, 4, 6, 8 and 2 more; raise" in deleted_line(range(0, 14, 2))


def test_a_result_has_its_interval_and_its_time():
    counts = np.array([2], np.int32)
    found = Evaluation(
        name="held",
        environment="copy-digits",
        learner="lead",
        version=4,
        sha256="ab",
        problems=np.array([7]),
        samples=counts,
        passed=counts,
        rewards=np.ones(2, np.float32),
        pass_at=[PassAt(k=k, problems=1, value=0.5, low=0.25, high=0.75) for k in (1, 2)],
        reward_mean=1.0,
        reward_low=1.0,
        reward_high=1.0,
        seconds=1.25,
    )
    assert result_line(found) == (
        "version 4, held: pass@1 0.500 [0.250, 0.750], pass@2 0.500 [0.250, 0.750] in 1.2 s"
    )
