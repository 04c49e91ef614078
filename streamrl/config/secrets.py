"""Secrets stay out of run files, which are copied, archived and published. A setting names an
environment variable, `env:NAME`, and the process that needs it looks there; so each part can be
given credentials of its own, under the same names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.errors import ConfigError

PREFIX = "env:"
# in names of librdkafka's settings, our own, envs' and sinks' parameters, options and variables, in
# any case
_SECRET = re.compile(
    r"password|passphrase|secret|credential|key\.pem|private[-_.]?key|oauthbearer\.config|(api|access|account|sas|auth)[-_.]?key|(^|[-_.])token$",
    re.IGNORECASE,
)
_AUTHORITY = re.compile(r"://[^/?#\s]*@")  # user:password@host
_SIGNED = re.compile(
    r"[?&]((x-amz-|x-goog-)?(sig|signature)|[\w-]*(password|secret|credential|key|token))=",
    re.IGNORECASE,
)
# What a child process that has no business with anybody's secrets is given of this one's variables.
_INHERITABLE = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMP|TEMP|TMPDIR|TERM|NO_COLOR|VIRTUAL_ENV|CC|CXX|SSL_CERT_FILE|SSL_CERT_DIR"
    "|LD_LIBRARY_PATH|LD_PRELOAD|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|STREAMRL_HOME|STREAMRL_NAP_S|STREAMRL_FORK|STREAMRL_SUPERVISOR"
    "|(LC|XDG|PYTHON|OMP|KMP|GOMP|MKL|OPENBLAS|MALLOC|CUDA|CUBLAS|NVIDIA|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|TRANSFORMERS|VLLM)_?\\w+"
)


def is_secret(name: str) -> bool:
    """Whether a setting of that name holds a secret."""
    return bool(_SECRET.search(name))


def is_reference(value: object) -> bool:
    return isinstance(value, str) and value.startswith(PREFIX)


def plaintext_secrets(value: object, where: str = "") -> Iterator[str]:
    """A sentence for each secret that stands itself in settings that are to lie in a file, however
    deep. It never quotes the secret.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            path = f"{where}.{name}" if where else str(name)
            if (
                is_secret(str(name))
                and isinstance(inner, str)
                and inner
                and not is_reference(inner)
            ):
                yield (
                    f"{path}: a secret does not belong in a run file; write {PREFIX}NAME there, and"
                    " set the variable NAME"
                )
            else:
                yield from plaintext_secrets(inner, path)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from plaintext_secrets(inner, f"{where}.{index}")
    elif isinstance(value, str) and (_AUTHORITY.search(value) or _SIGNED.search(value)):
        yield (
            f"{where}: credentials in a URI would show in logs and records; give them as"
            " environment variables of the library that opens it"
        )


def resolve_reference(value: str, where: str, environment: Mapping[str, str] = os.environ) -> str:
    """The value, or that of the variable that it refers to. Raises a ConfigError that names setting
    and variable if the variable is not set.
    """
    if not is_reference(value):
        return value
    name = value.removeprefix(PREFIX)
    if not environment.get(name):
        raise ConfigError(
            f"{where} is {value}, but the environment variable {name!r} is not set; set it for this"
            " process"
        )
    return environment[name]


def resolve_references(
    settings: Mapping[str, Any], where: str, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    return {
        name: resolve_reference(value, f"{where}.{name}", environment)
        if is_reference(value)
        else value
        for name, value in settings.items()
    }


def inheritable_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables for a child process that is to know no secret: those of the system, of Python
    and of the libraries that compute.
    """
    return {
        name: value
        for name, value in environment.items()
        if _INHERITABLE.fullmatch(name) and not is_secret(name)
    }
