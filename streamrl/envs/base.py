"""What an env is: problems, and rewards for answers. Sampling, counting and publishing are done for it (`process.py`).

class ReverseDigits:
    def __init__(self, seed: int, digits: int = 2): ...
    def problem(self, index: int) -> Problem: ...
    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]: ...
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from streamrl.errors import ConfigError

SHIPPED = {
    "copy-digits": "streamrl.envs.copy_digits:CopyDigits",
    "add-digits": "streamrl.envs.add_digits:AddDigits",
    "reasoning-gym": "streamrl.envs.reasoning_gym:ReasoningGym",
}


class Problem(NamedTuple):
    """One task, posed as a conversation that the policy is to answer."""

    messages: list[dict[str, Any]]  # OpenAI chat messages
    answer: Any = None  # whatever `rewards` needs
    metadata: Mapping[str, Any] = {}  # published with the rollout: plain values


class Answer(NamedTuple):
    """What the policy said."""

    text: str  # special tokens are shown, but for the closing end of sequence
    finished: bool  # it ended by itself; False: a limit cut it off


class Env(Protocol):
    """Endless problems, and what an answer is worth. Constructed with `seed` and the `params` of the run file."""

    def problem(self, index: int) -> Problem:
        """Problem number `index` >= 0: the same seed and index give the same problem, in any process."""
        ...

    def rewards(self, problem: Problem, answer: Answer) -> dict[str, float]:
        """Named rewards; their sum is the scalar that trains."""
        ...


def make(kind: str, seed: int, params: Mapping[str, Any], where: str) -> Env:
    """The env of that kind: a shipped name, FILE.py:CLASS or MODULE:CLASS. `where` names it in a ConfigError."""
    found = env_class(kind, where)
    parameters = inspect.signature(found).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = [parameter.name for parameter in parameters if parameter.name != "seed" and parameter.kind is not parameter.VAR_KEYWORD]
    for name in params:
        if name not in accepted and not takes_any:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(accepted) or 'none'}"
            raise ConfigError(f"{where}.params: {kind} takes no {name!r}; {hint}")
    try:
        return cast(Env, found(seed=seed, **params))
    except Exception as error:  # it is somebody else's code; many check their settings with `assert`
        raise ConfigError(f"{where}.params: {kind} refuses them: {one_line(error)}") from error


def env_class(kind: str, where: str) -> Any:
    path, colon, name = SHIPPED.get(kind, kind).rpartition(":")
    if not colon:
        near = difflib.get_close_matches(kind, SHIPPED, 1)
        hint = f"did you mean {near[0]!r}?" if near else "your own: FILE.py:CLASS or MODULE:CLASS"
        raise ConfigError(f"{where}: env {kind!r} not found; shipped are {', '.join(SHIPPED)}; {hint}")
    try:
        module = _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{where}: env {kind!r} cannot be loaded ({error}); is the path right, seen from where streamrl was started?") from error
    except Exception as error:  # whatever its own code raises
        raise ConfigError(f"{where}: env {kind!r} cannot be loaded, {path} fails with {one_line(error)}") from error
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        raise ConfigError(f"{where}: {path} has no class {name!r}")
    if missing := [method for method in ("problem", "rewards") if not callable(getattr(found, method, None))]:
        raise ConfigError(f"{where}: class {name!r} of {path} has no method {missing[0]!r}; an env has problem(index) and rewards(problem, answer)")
    return found


def one_line(error: Exception) -> str:
    """What somebody else's code raised, for a log or a record."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"env_from_file_{path.stem}", path)  # hides no other module
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
