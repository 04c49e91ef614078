"""Every row of the table (`make poison`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.poison.table import Row, rows

ROWS = list(rows())


@pytest.mark.parametrize("run", [run for _, run in ROWS], ids=[name for name, _ in ROWS])
def test_it_ends_as_it_must_and_ends_nobody(run: Callable[[], Row]):
    assert run().wrong == ""


def test_the_table_has_every_kind_that_the_parts_are_known_to_have_met():
    assert len(ROWS) >= 50 and len({name for name, _ in ROWS}) == len(ROWS)
