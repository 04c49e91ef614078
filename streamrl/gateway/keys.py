"""API keys: that of the gateway opens sessions, and that of a session opens this session only.

A session's key is `sk-<env>.<session>.<signature>`, so that every replica can check it without
knowing the session.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple, cast

PREFIX = "sk-"
SIGNATURE_DIGITS = 32
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
SECRET_FILE = "gateway.key"
# Where a call with the gateway's key names its session, in the metadata of its body.
SESSION_FIELD = "streamrl_session"


class SessionName(NamedTuple):
    env: str
    session: str


class SessionKeys:
    """Makes and checks keys. `gateway_key`: empty if anyone may open sessions. That is possible on
    loopback only.
    """

    def __init__(self, secret: bytes, gateway_key: str = "") -> None:
        self._secret = secret
        self._gateway_key = gateway_key

    def key_of(self, env: str, session: str) -> str:
        return f"{PREFIX}{env}.{session}.{self._signature(env, session)}"

    def session_of(self, key: str) -> SessionName | None:
        """The session that a key opens; None: it opens none."""
        named, _, signature = key.removeprefix(PREFIX).rpartition(".")
        env, _, session = named.rpartition(".")
        expected = self._signature(env, session)
        is_equal = hmac.compare_digest(signature.encode(), expected.encode())
        return SessionName(env, session) if is_equal and key.startswith(PREFIX) else None

    def opens_gateway(self, key: str) -> bool:
        if not self._gateway_key:
            return True
        return hmac.compare_digest(key.encode(), self._gateway_key.encode())

    def _signature(self, env: str, session: str) -> str:
        text = f"{env}.{session}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:SIGNATURE_DIGITS]


def session_in_metadata(metadata: object) -> SessionName | None:
    """The session that a call's metadata name, as ENV.SESSION; None: they name none."""
    if not isinstance(metadata, dict):
        return None
    named = str(cast(dict[str, object], metadata).get(SESSION_FIELD, ""))
    env, _, session = named.partition(".")
    return SessionName(env, session) if SESSION_ID.fullmatch(session) else None


def local_secret(directory: Path) -> bytes:
    """The secret of a run whose gateway has no key of its own: the same for all replicas on this
    machine, and after a restart.
    """
    file = directory / SECRET_FILE
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        own = directory / f".{SECRET_FILE}-{secrets.token_hex(8)}"
        handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, secrets.token_hex(32).encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        try:
            os.link(own, file)
        except FileExistsError:  # another replica was faster
            pass
        finally:
            own.unlink()
    return file.read_bytes()
