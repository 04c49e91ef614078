"""Do the tests test what runs? Each mutant is a change to one comparison, operation, constant or
result in code that decides, and the tests of its room are to fail on it.

    python -m tests.mutants [--count 300] [--seed 1] [--only streamrl/buffer/ ...]

The tests have to pass without a change. Then each mutant gets a fork of the process that has
collected them, and there the tests that call its function; as many at a time as there are cores.
What became of each is printed, and the share that was killed; below 90 % it exits with 1. `--only`
takes those of the mutants whose FILE:LINE begins with one of the given: a room at a time, or
survivors again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import json
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("buffer", "batcher", "extensions/assembler", "envs/sessions", "learner/loss")
LIMIT_S = 300  # of the processor, for the tests of one mutant; one that takes longer is killed
LIMIT_WAITING_S = 3600  # the same by the clock
LEAST_FRAC = 0.9
# What a report, a log or an error says is no decision.
WORDS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign)
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


class Site(NamedTuple):
    """A place where a file can be changed: the number of its node in `ast.walk`."""

    path: Path
    node: int
    line: int
    function: str  # qualified name of the outermost function around it

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def sites_of(path: Path) -> Iterator[Site]:
    """Every place of the file that may be changed: in functions, and not in words."""
    tree = ast.parse(path.read_text())
    skipped = set[ast.AST]()
    for node in ast.walk(tree):
        is_log = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")
        if isinstance(node, WORDS) or is_log:
            skipped.update(ast.walk(node))
        for name in ("annotation", "returns"):
            if hinted := getattr(node, name, None):
                skipped.update(ast.walk(hinted))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {inner for function in functions for part in function.body for inner in ast.walk(part)}
    owners = dict(owners_in(tree, ""))
    for number, node in enumerate(ast.walk(tree)):
        if node in inside and node not in skipped and change(copy.deepcopy(node)):
            line: int = node.lineno  # pyright: ignore[reportAttributeAccessIssue]
            yield Site(path, number, line, owners[node])


def owners_in(node: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
    """Each node inside a function, with the qualified name of the outermost one around it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((each, prefix + inner.name) for each in ast.walk(inner))
        elif isinstance(inner, ast.ClassDef):
            yield from owners_in(inner, f"{prefix}{inner.name}.")
        else:
            yield from owners_in(inner, prefix)


def change(node: ast.AST) -> str:
    """Change the node, and return what was done. Empty if it is of no kind that is changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            node.ops = [SWAPS[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            node.op = SWAPS[type(operator)]()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float() as number):
            node.value = number + 1
        case ast.IfExp() | ast.If() if not isinstance(node.test, ast.Compare | ast.BoolOp):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(value=ast.Constant(value="")):
            node.value = ast.Constant("a mutant")
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
        case _:
            return ""
    return ast.unparse(node).split("\n")[0]


def mutated(site: Site) -> tuple[ast.Module, str]:
    """The module of this site with its change, and the change in words."""
    tree = ast.parse(site.path.read_text())
    node = next(node for number, node in enumerate(ast.walk(tree)) if number == site.node)
    before = ast.unparse(node).split("\n")[0]
    after = change(node)
    return ast.fix_missing_locations(tree), f"{before}  ->  {after}"


class Room:
    """A plugin of pytest: it collects the tests of a room, and runs for each site those that call
    its function, in a fork whose function has the change.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.killed = 0
        self.has_failed = False  # a test of this process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        calls = self.calls_of(session.items)
        waiting = list(reversed(self.sites))
        running = dict[int, Site]()
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                site = waiting.pop()
                own = f"test_{site.path.stem}.py"
                called = (str(site.path), site.function)
                items = [
                    item for item, of in zip(session.items, calls, strict=True) if called in of
                ]
                items.sort(key=lambda item: item.path.name != own)
                child = os.fork()
                if child == 0:
                    os._exit(self.fails(items, site))
                running[child] = site
            child, status = os.wait()
            site = running.pop(child)
            self.killed += status != 0
            verdict = "killed  " if status else "SURVIVED"
            print(f"{verdict}  {site}  {mutated(site)[1]}", flush=True)
        return True

    def calls_of(self, items: Sequence[pytest.Item]) -> list[set[tuple[str, str]]]:
        """The functions that each test calls, as (file, qualified name). The tests run in a fork,
        so this process has no caches and no threads of them.
        """
        files = {str(site.path) for site in self.sites}
        called = set[tuple[str, str]]()

        def note(frame: FrameType, event: str, argument: object) -> None:
            code = frame.f_code
            if code.co_filename in files:
                called.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))

        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            silence()
            found = list[list[tuple[str, str]]]()
            threading.settrace(note)
            for number, item in enumerate(items):
                called.clear()
                sys.settrace(note)
                self.run(item, items[number + 1 : number + 2])
                found.append([*called])
            with os.fdopen(writer, "w") as file:
                json.dump(found, file)
            os._exit(self.has_failed)
        os.close(writer)
        with os.fdopen(reader) as file:
            text = file.read()
        if os.waitpid(child, 0)[1]:
            pytest.exit("a test has failed", returncode=1)
        return [{(file, name) for file, name in of} for of in json.loads(text)]

    def fails(self, items: Sequence[pytest.Item], site: Site) -> bool:
        """Whether one of the tests fails on the change of the site, which this process gets."""
        silence()
        signal.alarm(LIMIT_WAITING_S)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        install(site)
        for number, item in enumerate(items):
            self.run(item, items[number + 1 : number + 2])
            if self.has_failed:
                return True
        return False

    def run(self, item: pytest.Item, following: Sequence[pytest.Item]) -> None:
        nextitem = following[0] if following else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)


def silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def install(site: Site) -> None:
    """Give the site's function, wherever it is referred to, the code with the change."""
    module = compile(mutated(site)[0], str(site.path), "exec")
    changed = [code for code in codes_in(module) if code.co_qualname == site.function]
    for function in gc.get_objects():
        if not isinstance(function, FunctionType):
            continue
        code = function.__code__
        if (code.co_filename, code.co_qualname) != (str(site.path), site.function):
            continue
        # a property has two of the same name
        by_line = {each.co_firstlineno: each for each in changed}
        function.__code__ = by_line.get(code.co_firstlineno, changed[0])


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from codes_in(each)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[""], help="those that begin like this")
    given = parser.parse_args()
    files = [path for room in ROOMS for path in sorted((ROOT / "streamrl" / room).glob("*.py"))]
    sites = [site for path in files for site in sites_of(path)]
    chosen = random.Random(given.seed).sample(sites, min(given.count, len(sites)))
    chosen = [site for site in chosen if str(site).startswith(tuple(given.only))]
    killed = 0
    for room in sorted({site.path.parent.relative_to(ROOT / "streamrl") for site in chosen}):
        plugin = Room([site for site in chosen if site.path.parent == ROOT / "streamrl" / room])
        options = ["-s", "-qq", "-p", "no:cacheprovider", "-m", "not live and not slow"]
        tests = ROOT / "tests" / room
        if pytest.main([*options, str(tests)], plugins=[plugin]):
            sys.exit(f"{tests}: they fail without a mutant, so they would kill each one")
        killed += plugin.killed
    print(f"{killed} of {len(chosen)} killed, {killed / len(chosen):.1%}")
    sys.exit(killed < LEAST_FRAC * len(chosen))


if __name__ == "__main__":
    main()
