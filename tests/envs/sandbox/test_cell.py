"""What a cell makes of a test and of a value. How it runs them: test_programs.py."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from streamrl.envs.sandbox.cell import (
    answer,
    exception_named,
    free_names,
    module_used,
    pack,
    unpack,
)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "a", True],
        {(1, 2): {"a": [b"\x00"]}},
        {1, 2},
        frozenset({"a"}),
        (1j, ()),
        {"type": "dict", "items": [1]},
    ],
)
def test_plain_data_comes_back_as_it_was(value: Any):
    again = unpack(pack(value))
    assert again == value and type(again) is type(value)


class Like(int):
    """It behaves like a number, as it likes."""


@pytest.mark.parametrize("value", [Like(3), [object()], {1: print}])
def test_what_is_not_plain_data_does_not_leave_the_program(value: object):
    with pytest.raises(TypeError, match="is not plain data"):
        pack(value)


def test_a_test_takes_from_the_program_what_it_neither_makes_nor_has_from_python():
    test = "import re\nfor i in range(f(x)):\n  def g(y): return y + z\n  assert len(g(i)) == w"
    assert set(free_names(ast.parse(test))) == {"f", "x", "z", "w"}


def test_a_module_that_a_test_takes_something_from_is_pythons():
    tree = ast.parse("assert math.sqrt(f(4)) == numpy.e")
    assert module_used("math", tree) is math
    assert module_used("numpy", tree) is None and module_used("f", tree) is None


def test_an_exception_is_raised_again_by_its_name():
    assert exception_named("KeyError") is KeyError
    assert exception_named("Own") is exception_named("SystemExit") is RuntimeError


def test_a_question_is_answered_with_a_value_or_with_what_was_raised():
    names = {"f": lambda a, b: a / b, "x": 3, "y": object()}
    assert answer({"name": "x"}, names) == {"value": 3}
    assert answer({"name": "f"}, names) == {"callable": True}
    called = {"name": "f", "arguments": pack([[1], {"b": 2}])}
    assert answer(called, names) == {"value": 0.5}
    divided = {"name": "f", "arguments": pack([[1, 0], {}])}
    assert answer(divided, names)["raised"] == "ZeroDivisionError"
    assert answer({"name": "y"}, names)["raised"] == "TypeError"
    assert answer({"name": "z"}, names)["raised"] == "KeyError"
