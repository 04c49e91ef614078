"""The inside of the sandbox (`programs.py`): a process that is first confined and only then given
unreviewed text.

    python -I -S -B -c START DIRECTORY ROLE LIMITS

LIMITS is what `SandboxLimits.dump` gives. Questions and answers are lines of JSON. What the process
prints goes to the error output. It has one of two roles:

- A `program` runs the source that it is given, and then reports what its functions return. It never
  sees a test.
- An `examiner` runs the tests. The names that they use are the program's: each value and each
  result of a call is asked for and comes as plain data. Nothing of the program's process but plain
  data therefore takes part in a verdict.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from streamrl.envs.sandbox.limits import SandboxLimits, confine

START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from streamrl.envs.sandbox import cell; "
    "del sys.path[0]; cell.main(*sys.argv[2:])"
)
# The key of an object of a type that JSON does not have; its value names the type.
TYPE_KEY = "\0"
FILE = "program.py"  # the name of the program in tracebacks

MAKERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": bytes,
}

Say = Callable[[dict[str, Any]], None]


def main(role: str, limits: str) -> None:
    """Confine this process, report it, and take its role."""
    questions = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        confine(SandboxLimits.parse(limits), ())
    except OSError as error:
        say({"unconfined": str(error)})
        return
    say({"ready": True})
    {"program": serve, "examiner": examine}[role](questions, say)


def serve(questions: TextIO, say: Say) -> None:
    """Run the source, then answer what is asked about its names."""
    source = json.loads(questions.readline())["source"]
    # tracebacks show the lines of the source from here
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    names: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    try:
        exec(compile(source, FILE, "exec"), names)
    except Exception as error:
        print_traceback(error)
        sys.exit(1)
    say({"ran": True})
    for line in questions:
        say(answer(json.loads(line), names))
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def answer(question: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The value of a name or of a call, or what was raised instead."""
    try:
        value = names[question["name"]]
        if "arguments" in question:
            arguments, keywords = unpack(question["arguments"])
            return {"value": pack(value(*arguments, **keywords))}
        return {"callable": True} if callable(value) else {"value": pack(value)}
    except Exception as error:
        print_traceback(error)
        return {"raised": type(error).__name__, "message": str(error)[:1000]}


def print_traceback(error: Exception) -> None:
    """Print the traceback without the frames of this file."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__]
    lines: list[str] = []
    if inside:
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(inside)]
    lines += traceback.format_exception_only(error)
    print("".join(lines), end="", file=sys.stderr)


def examine(questions: TextIO, say: Say) -> None:
    """Run each test, and report which of them raised nothing."""

    def ask(question: dict[str, Any]) -> Any:
        say({"ask": question})
        answer = json.loads(questions.readline())
        if "raised" in answer:
            raise exception_named(str(answer["raised"]))(answer["message"])
        if "callable" in answer:
            return Function(question["name"], ask)
        return unpack(answer["value"])

    for index, test in enumerate(json.loads(questions.readline())["tests"]):
        passed = False
        with contextlib.suppress(BaseException):
            tree = ast.parse(test)
            names = {
                name: module_used(name, tree) or ask({"name": name}) for name in free_names(tree)
            }
            exec(compile(tree, f"test {index}", "exec"), names)
            passed = True
        say({"test": index, "passed": passed})


def exception_named(name: str) -> type[Exception]:
    """Python's exception of that name; RuntimeError if there is none."""
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


class Function:
    """A function of the program, called from a test."""

    def __init__(self, name: str, ask: Callable[[dict[str, Any]], Any]) -> None:
        self.__name__ = name
        self._ask = ask

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask({"name": self.__name__, "arguments": pack([list(arguments), keywords])})


def free_names(tree: ast.AST) -> Iterator[str]:
    """The names that a test uses, and neither binds nor has from Python."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler
        ):
            bound.add(node.name or "")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    used = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return (name for name in used if name not in bound and not hasattr(builtins, name))


def module_used(name: str, tree: ast.AST) -> Any:
    """The standard library's module of that name, if the test takes something from it without
    importing it; otherwise None.
    """
    bases = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    if name in bases and name in sys.stdlib_module_names:
        return importlib.import_module(name)
    return None


def pack(value: Any) -> Any:
    """Plain data as JSON. The exact type decides: an object that only behaves like a number is not
    plain data. Raises TypeError for what is not.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [pack(item) for item in value]
    if kind is dict:
        return {
            TYPE_KEY: "dict",
            "items": [[pack(key), pack(item)] for key, item in value.items()],
        }
    if kind in (tuple, set, frozenset):
        return {TYPE_KEY: kind.__name__, "items": [pack(item) for item in value]}
    if kind is bytes:
        return {TYPE_KEY: "bytes", "items": list(value)}
    if kind is complex:
        return {TYPE_KEY: "complex", "items": [value.real, value.imag]}
    raise TypeError(f"{kind.__name__} is not plain data, so it cannot be compared")


def unpack(data: Any) -> Any:
    """The data that `pack` has made JSON of."""
    if isinstance(data, list):
        return [unpack(item) for item in data]
    if isinstance(data, dict):
        items = unpack(data["items"])
        return complex(*items) if data[TYPE_KEY] == "complex" else MAKERS[data[TYPE_KEY]](items)
    return data
