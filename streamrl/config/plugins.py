"""Names in a run file of Python objects: a shipped one, one that an installed package
adds, or MODULE:NAME.

A package adds names by entry points, as plugins of pytest do. In its pyproject.toml:

    [project.entry-points."streamrl.envs"]
    sudoku = "my_package.sudoku:Sudoku"

A run file is its user's own, and what it names is imported. A journal, an export or another record
that names MODULE:NAME is not: what comes from outside can only choose among the names that the
user's run file has (`RunFile.imported`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

from streamrl.system.errors import ConfigError
from streamrl.system.text import unknown_name

Group = Literal["streamrl.envs", "streamrl.rewards", "streamrl.sinks"]


class Plugin(NamedTuple):
    """A name that an installed package adds."""

    path: str  # MODULE:NAME, which is imported only where a run file names the plugin
    package: str  # that adds it, with its version


def plugins(group: Group) -> dict[str, Plugin]:
    """The additions of installed packages to a group, by name in a run file. Nothing is imported.

    Raises ConfigError if two packages add the same name.
    """
    return _plugins(group, tuple(sys.path))


@functools.cache  # reading what is installed takes 20 ms, and each of a thousand envs asks
def _plugins(group: Group, path: tuple[str, ...]) -> dict[str, Plugin]:
    found: dict[str, Plugin] = {}
    for entry in entry_points(group=group):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown package"
        plugin = Plugin(entry.value, package)
        if entry.name in found and found[entry.name].path != plugin.path:
            raise ConfigError(
                f"{entry.name!r} in {group} is added by {found[entry.name].package} and by"
                f" {package}; uninstall one of them, or name the one you want as MODULE:NAME"
            )
        found[entry.name] = plugin
    return found


def import_path(path: str, setting: str, shipped: Iterable[str]) -> Any:
    """The object at MODULE:NAME. Raises a ConfigError that names the `setting`, and the `shipped`
    names, if there is none.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: {unknown_name(path, shipped)}")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: {path!r} cannot be imported ({error}); is the module on PYTHONPATH?"
        ) from None
    except AttributeError:
        raise ConfigError(f"{setting}: module {module_name!r} has no {name!r}") from None


def import_choice(name: str, setting: str, targets: Mapping[str, str]) -> Any:
    """The object that a setting chooses: the one that ships under the name, by its MODULE:NAME in
    `targets`, or the one at the MODULE:NAME that the setting has. Raises ConfigError.
    """
    return import_path(targets.get(name, name), setting, targets)


def is_import(value: object) -> bool:
    """Whether the value is MODULE:NAME or FILE.py:NAME. A URI is neither."""
    return isinstance(value, str) and ":" in value and "://" not in value


def imports_in(value: object) -> Iterator[str]:
    """Every MODULE:NAME among plain values, keys included."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from imports_in(key)
            yield from imports_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from imports_in(inner)
    elif is_import(value):
        yield str(value)
