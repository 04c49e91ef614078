"""Evaluates expressions of whole numbers with + - * and brackets, and nothing that could run or
grow without end.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

LONGEST = 200  # characters of an expression
LARGEST = 10**18  # the absolute value of any number on the way
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def value(expression: str) -> int:
    """The value of the expression. Raises ValueError, in a few words, if it is no such expression
    or too large.
    """
    if len(expression) > LONGEST:
        raise ValueError("too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only whole numbers, + - * and brackets")
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value
