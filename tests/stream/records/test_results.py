from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from tests.support.build import evaluation, floats


def test_the_counts_of_an_evaluation_fit_each_other():
    record = evaluation("copy")
    with pytest.raises(ValueError, match="more answers are right than there are"):
        structs.replace(record, passed=record.samples + np.int32(1))
    with pytest.raises(ValueError, match="rewards has shape"):
        structs.replace(record, rewards=floats())


def test_the_samples_of_an_evaluation_are_counted():
    record = evaluation("copy")
    with pytest.raises(ValueError, match="samples are float32"):
        structs.replace(record, samples=record.samples.astype(np.float32))
