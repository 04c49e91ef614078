"""Names in a run file that stand for Python objects: a shipped one, or MODULE:NAME."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from streamrl.errors import ConfigError, unknown


def import_path(path: str, setting: str, shipped: Iterable[str]) -> Any:
    """The object at MODULE:NAME. `setting` and `shipped` make the ConfigError useful when there is none."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: {unknown(path, shipped)}")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"{setting}: {path!r} cannot be imported ({error}); is the module on PYTHONPATH?") from None
    except AttributeError:
        raise ConfigError(f"{setting}: module {module_name!r} has no {name!r}") from None
