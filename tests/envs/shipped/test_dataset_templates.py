"""Right answers of data sets that many people train on."""

from __future__ import annotations

import pytest

from streamrl.envs.shipped.dataset_templates import after_hashes, of_last_box


def test_the_answer_after_the_hashes():
    assert after_hashes("She sold 48/2 = <<48/2=24>>24.\n#### 72") == "72"
    assert after_hashes("#### 1\n#### 1,072 ") == "1,072"


@pytest.mark.parametrize("solution", ["72", "#### ", ""])
def test_a_solution_without_hashes_is_refused(solution: str):
    with pytest.raises(ValueError, match="no answer after ####"):
        after_hashes(solution)


def test_the_answer_in_the_last_box():
    assert of_last_box(r"First $\boxed{1}$. So it is $\boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"


@pytest.mark.parametrize("solution", ["72", r"\boxed{}", r"\boxed{72"])
def test_a_solution_without_a_box_is_refused(solution: str):
    with pytest.raises(ValueError, match="no answer in a box"):
        of_last_box(solution)
