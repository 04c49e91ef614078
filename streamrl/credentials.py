"""Secrets stay out of run files, which are copied, archived and published. A setting names an environment variable, `env:NAME`, and the process that
needs it looks there; so each part can be given credentials of its own, under the same names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from streamrl.errors import ConfigError

PREFIX = "env:"
BROKER_VARIABLES = "STREAMRL_KAFKA"  # variables whose names begin so are not handed on to vLLM, which has no business with the broker
_SECRET = re.compile(r"password|passphrase|secret|key\.pem|oauthbearer\.config|api_key")  # of librdkafka's settings and our own


def is_secret(name: str) -> bool:
    """Is the setting of that name one that nobody else may read?"""
    return bool(_SECRET.search(name))


def is_reference(value: object) -> bool:
    return isinstance(value, str) and value.startswith(PREFIX)


def exposed(settings: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with settings that are to lie in a file: secrets that stand there themselves. Never says what they are."""
    bare = [name for name, value in settings.items() if is_secret(name) and value and not is_reference(value)]
    return [f"{where}.{name}: a secret does not belong in a run file; write {PREFIX}NAME there, and set the variable NAME" for name in bare]


def reveal(value: str, where: str, environment: Mapping[str, str] = os.environ) -> str:
    """The value, or that of the variable it refers to. Raises ConfigError, naming both, when there is none."""
    if not is_reference(value):
        return value
    name = value.removeprefix(PREFIX)
    if not environment.get(name):
        raise ConfigError(f"{where} is {value}, but the environment variable {name!r} is not set; set it for this process")
    return environment[name]


def reveal_all(settings: Mapping[str, Any], where: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    return {name: reveal(value, f"{where}.{name}", environment) if is_reference(value) else value for name, value in settings.items()}
