"""Do the tests test what runs? Each mutant is a change to one comparison, operation, constant or
result in code that decides, and the tests of its room are to fail on it.

    python -m tests.mutants [--count 300] [--seed 1] [--only streamrl/buffer/ ...]

The tests have to pass without a change. Then each mutant gets its own process, as many at a time as
there are cores. What became of each is printed, and the share that was killed; below 90 % it exits
with 1. `--only` takes those of the mutants whose FILE:LINE begins with one of the given: a room at
a time, or survivors again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.machinery
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.conftest import QUICK_TO_COMPILE

ROOT = Path(__file__).parents[1]
ROOMS = ("buffer", "batcher", "extensions/assembler", "envs/sessions", "learner/loss")
LIMIT_S = 300  # of the processor, for the tests of one mutant; one that takes longer is killed
LIMIT_WAITING_S = 3600  # the same by the clock
# What tests import besides streamrl. Imported here, it is there after each fork.
LIBRARIES = ("hypothesis", "httpx", "msgspec", "numpy", "openai", "pyarrow", "pydantic", "levanter")
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
    for number, node in enumerate(ast.walk(tree)):
        if node in inside and node not in skipped and change(copy.deepcopy(node)):
            yield Site(path, number, node.lineno)  # pyright: ignore[reportAttributeAccessIssue]


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


def verdicts(sites: Sequence[Site]) -> Iterator[tuple[Site, bool]]:
    """Whether a test of its room fails on the change, for each site."""
    waiting = list(reversed(sites))
    running = dict[int, Site]()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            site = waiting.pop()
            child = os.fork()
            if child == 0:
                os._exit(is_killed(site))
            running[child] = site
        child, status = os.wait()
        yield running.pop(child), status != 0


def is_killed(site: Site) -> bool:
    """Whether the tests of the site's file or, if these pass, of its room fail on the change."""
    room = ROOT / "tests" / site.path.parent.relative_to(ROOT / "streamrl")
    own = room / f"test_{site.path.stem}.py"
    return (own.exists() and run_tests(own, site)) or run_tests(room, site)


def run_tests(target: Path, site: Site | None = None) -> bool:
    """Run tests in a process of their own, with the change of the site. True if they fail."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_WAITING_S)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if site is not None:
            install(site)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not live and not slow"]
        os._exit(int(pytest.main([*options, str(target)])))
    return os.waitpid(child, 0)[1] != 0


def install(site: Site) -> None:
    """Let the site's module be imported with its change."""
    name = ".".join(site.path.relative_to(ROOT).with_suffix("").parts)
    code = compile(mutated(site)[0], str(site.path), "exec")

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module: ModuleType) -> None:
            exec(code, module.__dict__)

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, fullname, path=None, target=None):  # pyright: ignore
            spec = super().find_spec(fullname, path, target)
            if spec is not None and fullname == name:
                spec.loader = Loader(name, str(site.path))
            return spec

    sys.meta_path.insert(0, Finder)


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
    os.environ.update(QUICK_TO_COMPILE)
    for library in LIBRARIES:
        importlib.import_module(library)
    for room in sorted({site.path.parent.relative_to(ROOT / "streamrl") for site in chosen}):
        if run_tests(ROOT / "tests" / room):
            sys.exit(f"tests/{room}: they fail without a mutant, so they would kill each one")
    killed = 0
    for site, is_dead in verdicts(chosen):
        killed += is_dead
        print(f"{'killed' if is_dead else 'SURVIVED'}  {site}  {mutated(site)[1]}", flush=True)
    print(f"{killed} of {len(chosen)} killed, {killed / len(chosen):.1%}")
    sys.exit(killed < LEAST_FRAC * len(chosen))


if __name__ == "__main__":
    main()
