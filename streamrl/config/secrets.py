"""Secrets stay out of run files, which are copied, archived and published. A setting names an
environment variable, `env:NAME`, and the process that needs it looks there; so each part can be
given its own credentials, under the same names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from streamrl.system.errors import ConfigError

PREFIX = "env:"
# in names of librdkafka's settings, our own, envs' and sinks' parameters, options and variables, in
# any case
_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|key\.pem|private[-_.]?key|oauthbearer\.config"
    r"|(api|access|account|sas|auth)[-_.]?key|(^|[-_.])token$|authorization|cookie"
    r"|basic[-_.]?auth|connection[-_.]?string|(^|[-_.])(pwd|pat|auth|bearer|dsn|signature)$",
    re.IGNORECASE,
)
# What secrets look like, whatever the setting is called: keys of providers and of our gateway
# (`envs/sessions/keys.py`), tokens of code hosts and registries, JSON web tokens, private keys,
# HTTP's credentials, and addresses of webhooks.
_SHAPE = re.compile(
    r"(?<![\w-])(sk-[\w-]{16,}|sk-(open|sample|grade)\.[\w.-]{16,}"
    r"|(ghp|gho|ghs|ghu|github_pat|glpat|hf|npm|xox[abeprs])[-_]\w[\w-]{15,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|^(bearer|basic|token) \S{8,}"
    r"|://hooks\.slack\.com/|://(\w+\.)?discord(app)?\.com/api/webhooks/",
    re.IGNORECASE,
)
# Values that are neither a secret nor a reference: most of those of a run file.
_TEXTLESS = (int, float, type(None))
MAX_JSON = 1 << 20  # characters of a text that is read as JSON
# Settings besides secrets that may refer to a variable: the address differs from pod to pod.
_ADDRESSES = ("inference.host",)
_OF_A_CLUSTER = re.compile(r"kafka\.(sasl|ssl)\.")
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


@lru_cache(4_096)  # A run file has a setting many times, once for each env.
def is_secret(name: str) -> bool:
    """Whether a setting of that name holds a secret."""
    return bool(_SECRET.search(name))


def is_reference(value: object) -> bool:
    return isinstance(value, str) and value.startswith(PREFIX)


def references(value: object, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys that lead to each `env:NAME` in these settings, at any depth, and its NAME."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from references(inner, (*where, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from references(inner, (*where, str(index)))
    elif isinstance(value, str) and is_reference(value):
        yield where, value.removeprefix(PREFIX)


def plaintext_secrets(value: object, where: str = "") -> Iterator[str]:
    """A sentence for each secret that these settings contain as plain text, at any depth. It never
    quotes the secret.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, _TEXTLESS):
                continue
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
    elif isinstance(value, str):
        yield from _secrets_in_text(value, where)


def _secrets_in_text(text: str, where: str) -> Iterator[str]:
    """A sentence for each secret that a text holds by its look, or as JSON."""
    if _AUTHORITY.search(text) or _SIGNED.search(text):
        yield (
            f"{where}: credentials in a URI would show in logs and records; give them as"
            " environment variables of the library that opens it"
        )
    elif _SHAPE.search(text):
        yield (
            f"{where}: it looks like a secret, which does not belong in a run file; write"
            f" {PREFIX}NAME in a setting that takes one, and set the variable NAME"
        )
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    if start < 0 or len(text) > MAX_JSON:
        return
    try:
        inner = json.loads(text[start:])
    except (ValueError, RecursionError):
        return
    yield from plaintext_secrets(inner, where)


def misplaced_references(value: object, where: str = "") -> Iterator[str]:
    """A sentence for each `env:NAME` in settings that hold no secret. The author of a run file
    would otherwise choose which variables of its reader's are sent elsewhere.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, _TEXTLESS):
                continue
            path = f"{where}.{name}" if where else str(name)
            takes = is_secret(str(name)) or path in _ADDRESSES or _OF_A_CLUSTER.match(path)
            if not (is_reference(inner) and takes):
                yield from misplaced_references(inner, path)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from misplaced_references(inner, f"{where}.{index}")
    elif is_reference(value):
        yield (
            f"{where}: {PREFIX}NAME is for secrets (kafka.sasl.*, kafka.ssl.*, keys, tokens) and"
            f" for {', '.join(_ADDRESSES)}; write the value itself"
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
