"""Loads what a run file names: a class or function by FILE.py:NAME or MODULE:NAME, and instances
of classes with their `params`. It is the user's own code, so every way that it can fail is a
ConfigError in one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from streamrl.system.errors import ConfigError, describe_error
from streamrl.system.text import did_you_mean


def load(path: str, where: str, what: str) -> Any:
    """The object at FILE.py:NAME or MODULE:NAME; None if there is no such name. `where` (a setting)
    and `what` (env or reward) are for the error.
    """
    source, _, name = path.rpartition(":")
    try:
        if source.endswith(".py"):
            module = _module_from_file(Path(source))
        else:
            module = importlib.import_module(source)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{where}: {what} {path!r} cannot be loaded ({error}); is the path right, seen from "
            "where streamrl was started?"
        ) from error
    except Exception as error:  # whatever its own code raises
        raise ConfigError(
            f"{where}: {what} {path!r} cannot be loaded, {source} fails with"
            f" {describe_error(error)}"
        ) from error
    return getattr(module, name, None)


def construct(factory: Any, kind: str, params: Mapping[str, Any], where: str, **given: Any) -> Any:
    """Call a class or function with the `params` of the run file, and with what is `given` by us.
    Raises ConfigError for a parameter that it does not take, or refuses.
    """
    accepted: list[str] = []
    takes_any = False
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.name not in given:
            accepted.append(parameter.name)
    for name in params:
        if name not in accepted and not takes_any:
            hint = did_you_mean(name, accepted) or f"it takes {', '.join(accepted) or 'none'}"
            raise ConfigError(f"{where}.params: {kind} takes no {name!r}; {hint}")
    try:
        return factory(**given, **params)
    except Exception as error:  # another author's code; much of it checks settings by `assert`
        raise ConfigError(
            f"{where}.params: {kind} refuses them: {describe_error(error)}"
        ) from error


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    # the name is its own, so that the file hides no other module
    spec = importlib.util.spec_from_file_location(f"env_from_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
