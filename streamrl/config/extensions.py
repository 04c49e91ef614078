"""What a run can have in addition to the core. An extension is a package in `streamrl/extensions/`.
The core finds it there and names none.

Its module `extension` has one declaration, `EXTENSION`, from which follow the run file, the parts,
the access rules and the list of metrics. Its module `commands` has `COMMANDS` of the command line.
Either may be left out.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.config.metric_spec import MetricSpec
    from streamrl.config.run_file import RunFile
    from streamrl.config.sections.section import Section
    from streamrl.config.topology import Role

PACKAGE = "streamrl.extensions"


def no_problems(run: RunFile) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an extension adds to runs. Its name is that of its package."""

    section: type[Section] | None = None  # of the run file, under the name of the extension
    problems: Callable[[RunFile], Iterator[str]] = no_problems  # settings that cannot work
    roles: tuple[Role, ...] = ()
    metrics: tuple[MetricSpec, ...] = ()


@cache
def extensions() -> dict[str, Extension]:
    """The declarations of all extensions, by name."""
    return {name: module.EXTENSION for name, module in modules_called("extension")}


def modules_called(name: str) -> Iterator[tuple[str, Any]]:
    """The extensions that have a module of this name, in the order of their names, each with the
    module.
    """
    for package in pkgutil.iter_modules(import_module(PACKAGE).__path__):
        path = f"{PACKAGE}.{package.name}.{name}"
        if find_spec(path):
            yield package.name, import_module(path)
