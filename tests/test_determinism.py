"""A step is a function of its arguments: nothing that it calls reads the clock, randomness, the
environment or a file, or orders things by hash.

Held three ways. By its sources: from `step` and `paused` on, every name that may be reached is
followed through the package, and what leaves it must be on a list. By watching: the real steps run
over everything that can come while each call is looked at. By comparing: the same fold in processes
with other hash seeds gives the same bytes. Each way is shown to find what it is there for.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import functools
import gc
import hashlib
import os
import random
import secrets
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from streamrl.stream.log.codec import digest
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import decode_and_step
from tests.support.groups import joined
from tests.support.inputs import log_of, mixed_inputs, real_parts, schedule_of
from tests.support.waiting import patience

PACKAGE = Path(__file__).parents[1] / "streamrl"
ROOTS = [
    (f"streamrl.{room}.process", name)
    for room in ("buffer", "batcher")
    for name in ("step", "paused")
] + [("streamrl.stream.processor.transaction", "decode_and_step")]

# ---- by its sources ------------------------------------------------------------------------------

MODULES = (
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "typing",
)
MODULES += ("msgpack", "msgspec", "numpy", "re")
NOT_THESE = (
    "numpy.random",
    "numpy.load",
    "numpy.save",
    "numpy.fromfile",
    "numpy.memmap",
    "numpy.loadtxt",
    "numpy.genfromtxt",
    "numpy.datetime64",
)
BUILTINS = {
    "open",
    "input",
    "print",
    "id",
    "hash",
    "eval",
    "exec",
    "compile",
    "__import__",
    "globals",
    "locals",
    "vars",
    "breakpoint",
    "object",
}
# loads the function that the run file names: code, and the same at every step
LEAVES = {("streamrl.config.plugins", "import_path")}
Place = tuple[str, str]  # module, name of what it defines


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package, by its name."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = [
        ".".join(("streamrl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in files
    ]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, files, strict=True)}


def definitions(module: ast.Module) -> dict[str, ast.stmt]:
    """What a module defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                name.id: node
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
    return found


def imported(tree: ast.AST) -> dict[str, str]:
    """Names that imports bring in, wherever they stand, and what they stand for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0]: (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return found


def names(node: ast.AST) -> Iterator[str]:
    """Names used, with the attributes taken of them: `np.random.random`."""
    for child in ast.walk(node):
        parts = list[str]()
        while isinstance(child, ast.Attribute):
            parts.append(child.attr)
            child = child.value
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            yield ".".join([child.id, *reversed(parts)])


def reached(modules: Mapping[str, ast.Module], roots: list[Place]) -> dict[str, Place]:
    """What may be called from the roots and is not the package's own: full name -> who uses it. A
    class is reached with all its methods.
    """
    todo = list(roots)
    seen = set[Place]()
    outside = dict[str, Place]()
    while todo:
        here = todo.pop()
        if here in seen or here in LEAVES:
            continue
        seen.add(here)
        module, name = here
        own = definitions(modules[module])
        foreign = imported(modules[module])
        assert name in own, f"{module} defines no {name}"
        for used in names(own[name]):
            first, _, rest = used.partition(".")
            if first in own:
                todo.append((module, first))
            elif first in foreign:
                full = ".".join(filter(None, (foreign[first], rest)))
                place = within(modules, full)
                if place:
                    todo.append(place)
                elif not full.startswith("streamrl"):
                    outside.setdefault(full, here)
            elif hasattr(builtins, first):
                outside.setdefault(f"builtins.{first}", here)
    return outside


def within(modules: Mapping[str, ast.Module], full: str) -> Place | None:
    """Where the package defines what has this name, if it does."""
    parts = full.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if module in modules:
            if parts[cut] in definitions(modules[module]):
                return module, parts[cut]
            further = imported(modules[module]).get(parts[cut])
            return within(modules, further) if further else None
    return None


def may(name: str) -> bool:
    module, _, rest = name.partition(".")
    if module == "builtins":
        return rest not in BUILTINS
    return module in MODULES and not name.startswith(NOT_THESE)


def test_what_a_step_may_reach_is_on_the_list():
    outside = reached(sources(), ROOTS)
    assert {name: user for name, user in outside.items() if not may(name)} == {}
    # it looks as far as groups.py and parts.py
    assert "numpy.concatenate" in outside and "hashlib.sha256" in outside


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef step(): return time.time()",
        "from time import monotonic as now\ndef step(): return now()",
        (
            "from datetime import datetime\nclass Clock:\n    def read(self): return"
            " datetime.now()\ndef step(): return Clock().read()"
        ),
        "import random\ndef helper(): return random.random()\ndef step(): return helper()",
        "import numpy as np\nNOISE = np.random.default_rng\ndef step(): return NOISE()",
        "import numpy as np\ndef step(): return np.datetime64('now')",
        "import uuid\ndef step(): return uuid.uuid4()",
        "import secrets\ndef step(): return secrets.token_hex()",
        "import os\ndef step(): return os.environ['HOME']",
        "def step():\n    from os import getenv\n    return getenv('HOME')",
        "def step(): return open('x')",
        "from pathlib import Path\ndef step(): return Path('x').read_text()",
        "import numpy as np\ndef step(): return np.fromfile('x')",
        "import socket\ndef step(): return socket.socket()",
        "import threading\ndef step(): return threading.get_ident()",
        "def step(a, b): return sorted([a, b], key=id)",
        "def step(a, b): return hash(a)",
        # through the package, to its clock
        "from streamrl.stream.processor import processor as p\ndef step(): return p.run_processor",
    ],
)
def test_a_source_that_reaches_further_is_found(source: str):
    outside = reached({**sources(), "bad": ast.parse(source)}, [("bad", "step")])
    assert [name for name in outside if not may(name)]


# ---- by watching ---------------------------------------------------------------------------------

WATCHED = {
    "time",
    "datetime",
    "random",
    "_random",
    "secrets",
    "uuid",
    "os",
    "posix",
    "io",
    "_io",
    "pathlib",
    "socket",
    "_socket",
    "tempfile",
}
WATCHED_CALLS = {
    ("builtins", "open"),
    ("builtins", "input"),
    ("builtins", "id"),
    ("builtins", "hash"),
    ("numpy", "fromfile"),
}


@contextmanager
def watching() -> Iterator[list[str]]:
    """Everything forbidden that is called in this thread meanwhile, however its name came there.
    numpy's own generator is seen by its state.
    """
    offences: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            modules = {frame.f_globals.get("__name__", "")}
            name = frame.f_code.co_name
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            name = argument.__name__
            kind = owner if isinstance(owner, type) else type(owner)
            modules = {
                owner.__name__ if isinstance(owner, ModuleType) else kind.__module__,
                str(argument.__module__),
            }
        else:
            return
        offences.extend(
            f"{module}.{name}"
            for module in modules
            if module in WATCHED or (module, name) in WATCHED_CALLS
        )

    before = generator_state()
    gc.disable()  # whoever listens to collections (hypothesis does) is not the step
    sys.setprofile(look)
    try:
        yield offences
    finally:
        sys.setprofile(None)
        gc.enable()
        if generator_state() != before:
            offences.append("numpy.random")


def generator_state() -> bytes:
    kind, keys, *rest = np.random.get_state()
    return f"{kind} {rest}".encode() + keys.tobytes()


def watched_fold(part: Processor[Any, Any], seed: int) -> tuple[list[str], bytes]:
    """Everything that can come, through `apply` and `paused`. Returns what was called and must not
    be, and a digest of all outputs and the state.
    """
    log = log_of(mixed_inputs())
    if part.name == "batcher":
        run_through(log, real_parts(17)[0], seed)
    return run_through(log, part, seed)


def run_through(log: Any, part: Processor[Any, Any], seed: int) -> tuple[list[str], bytes]:
    state = part.initial()
    positions = dict[Any, int]()
    called = list[str]()
    total = hashlib.sha256()
    writer = log.writer(part.name)
    for number, turn in enumerate(schedule_of(log, part, [5, 1, 9], random.Random(seed))):
        messages: list[Any] = []
        for where, count in turn:
            more, positions[where] = log.take(where, positions.get(where, 0), count)
            messages += more
        messages = joined(log, part, messages)
        with watching() as offences:
            result = decode_and_step(part, part.config, state, messages, float(number))
            state = result.state
            part.paused(part.config, state)
        called += offences
        total.update(digest([*result.outputs, *result.metrics]) + serialize_state(state))
        writer.commit(result.outputs)
    return called, total.digest()


@pytest.mark.parametrize("name", ["buffer", "batcher"])
@pytest.mark.parametrize("seed", range(3))
def test_the_real_steps_call_nothing_that_they_must_not(name: str, seed: int):
    (part,) = [part for part in real_parts(17) if part.name == name]
    called, _ = watched_fold(part, seed)
    assert called == []


OFFENCES: dict[str, Callable[[], object]] = {
    "clock": time.time,
    "clock by another name": monotonic,
    "date": lambda: datetime.datetime.now(),
    "random": lambda: random.random(),
    "own generator": lambda: random.Random().random(),
    "numpy's generator": lambda: np.random.random(),
    "an unseeded generator": lambda: np.random.default_rng().random(),
    "uuid": uuid.uuid4,
    "secrets": lambda: secrets.token_hex(4),
    "environment": lambda: os.environ.get("HOME"),
    "getenv": lambda: os.getenv("HOME"),
    "process id": os.getpid,
    "file": lambda: open(__file__).close(),
    "file by its path": lambda: Path(__file__).read_bytes(),
    "file by its number": lambda: os.close(os.open(__file__, os.O_RDONLY)),
    "array file": lambda: np.fromfile(__file__, np.uint8, 1),
    "socket": lambda: socket.socket().close(),
    "address": lambda: id({}),  # as a sort key only the sources show it
    "hash": lambda: hash("a"),
}


@pytest.mark.parametrize("what", OFFENCES)
def test_a_step_that_does_is_found(what: str):
    def step(*arguments: Any) -> Any:
        OFFENCES[what]()
        return good.step(*arguments)

    good = real_parts(17)[0]
    called, _ = watched_fold(replace(good, step=step), 0)
    assert called


# ---- by comparing --------------------------------------------------------------------------------


def by_set(part: Processor[Any, Any]) -> Processor[Any, Any]:
    """The part with its outputs in the order of a set."""

    def step(*arguments: Any) -> Any:
        state, outputs = part.step(*arguments)
        order = list({f"{output.topic} {place}" for place, output in enumerate(outputs)})
        return state, sorted(
            outputs, key=lambda output: order.index(f"{output.topic} {outputs.index(output)}")
        )

    return replace(part, step=step)


def fold_digests(altered: bool) -> str:
    """Of both parts; called in processes of its own."""
    return " ".join(
        watched_fold(by_set(part) if altered else part, 0)[1].hex() for part in real_parts(17)
    )


def in_processes(altered: bool) -> set[str]:
    program = f"from tests.test_determinism import fold_digests; print(fold_digests({altered}))"
    found: set[str] = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=PACKAGE.parent,
            env=environment,
            timeout=patience(120),
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    return found


def test_other_hash_seeds_give_the_same_bytes():
    assert len(in_processes(altered=False)) == 1


def test_an_order_that_comes_from_a_set_is_found():
    assert len(in_processes(altered=True)) > 1
