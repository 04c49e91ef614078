"""Expressions that the calculator works out, by hand."""

from __future__ import annotations

import pytest

from streamrl.envs.shipped import arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*4", 12),
        (" -(2+3)*4 - 1", -21),
        ("10**9", None),
        ("1/2", None),
        ("3*", None),
        ("__import__('os')", None),
        ("True", None),
    ],
)
def test_arithmetic(expression: str, value: int | None):
    if value is not None:
        assert arithmetic.value(expression) == value
        return
    with pytest.raises(ValueError, match="expression|only whole numbers"):
        arithmetic.value(expression)


@pytest.mark.parametrize(
    "expression", ["*".join(["9"] * 90), "(" * 150 + "1" + ")" * 150 + "1" * 150, "9" * 30]
)
def test_arithmetic_stays_small(expression: str):
    with pytest.raises(ValueError, match="too l"):
        arithmetic.value(expression)
