"""API keys of the gateway: what each may do, in which env and session of the run, and until when.

All are signed by the run's signing secret, which opens nothing itself. A key is
`sk-RIGHT.RUN.ENV.SESSION.MADE.EXPIRES.SIGNATURE`, so every replica can check it without having
stored it. The signature is an HMAC-SHA256, and its key is derived from the secret for one run, env
and right by HKDF (RFC 5869), so that no key helps to make another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from streamrl.config.run_file import RunFile
from streamrl.config.secrets import resolve_reference
from streamrl.envs.sessions.settings import Gateway
from streamrl.system.errors import ConfigError

# open: opens and resumes sessions of an env, and ends those that an env server has left.
# sample: samples in a session; without a session in any of the env that a call names.
# grade: sets a session's rewards, and ends it.
Right = Literal["open", "sample", "grade"]

PREFIX = "sk-"
SIGNATURE_DIGITS = 32
MIN_SECRET = 32  # characters: a shorter secret could be found by trying, given one of its keys
SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")
SECRET_FILE = "gateway.key"
# Where a call with an env's key names its session, in the metadata of its body.
SESSION_FIELD = "streamrl_session"


class SessionName(NamedTuple):
    env: str
    session: str

    def __str__(self) -> str:
        return f"{self.env}.{self.session}"


class Key(NamedTuple):
    """What a key is for."""

    right: Right
    env: str
    session: str  # empty: any session of the env


class KeyRefused(Exception):
    """The text is no key of this run, or is one no more. The message gives the reason."""


class RunKeys:
    """Makes and checks the keys of a run.

    `revoked_before`: by env, the time in seconds; keys that were made earlier are refused.
    """

    def __init__(
        self, secret: bytes, run: str, revoked_before: Mapping[str, float] | None = None
    ) -> None:
        self._run = run
        self._revoked_before = revoked_before or {}
        self._extracted = hmac.digest(b"streamrl gateway", secret, "sha256")

    def make(self, key: Key, now_s: float, valid_s: float) -> str:
        """The text of a key that is good for `valid_s` seconds."""
        made_s = int(now_s)
        expires_s = int(now_s + valid_s)
        head = f"{key.right}.{self._run}.{key.env}.{key.session}.{made_s}.{expires_s}"
        return f"{PREFIX}{head}.{self._signature(head, key.env, key.right)}"

    def check(self, text: str, now_s: float) -> Key:
        """What the key in `text` is for. Raises KeyRefused."""
        head, _, signature = text.removeprefix(PREFIX).rpartition(".")
        fields = head.split(".")
        if not text.startswith(PREFIX) or len(fields) != 6 or fields[0] not in get_args(Right):
            raise KeyRefused("it is no key of a gateway")
        right, run, env, session, made_s, expires_s = fields
        expected = self._signature(head, env, right)
        if run != self._run or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise KeyRefused(f"it is no key of run {self._run}")
        if now_s >= int(expires_s):
            raise KeyRefused("it has expired")
        if int(made_s) < self._revoked_before.get(env, 0.0):
            raise KeyRefused("it is revoked (gateway.revoked_before of the run file)")
        return Key(cast(Right, right), env, session)

    def _signature(self, head: str, env: str, right: str) -> str:
        info = f"{self._run}.{env}.{right}".encode()
        derived = hmac.digest(self._extracted, info + b"\x01", "sha256")
        return hmac.new(derived, head.encode(), hashlib.sha256).hexdigest()[:SIGNATURE_DIGITS]


def keys_of(run: RunFile) -> RunKeys:
    """The keys of a run, signed by the secret of its run file, or else by that of its directory.
    Raises ConfigError for a secret that is not there, or is too short.
    """
    settings = run.settings_of(Gateway)
    if settings.signing_secret:
        secret = resolve_reference(settings.signing_secret, "gateway.signing_secret").encode()
    else:
        secret = local_secret(run.directory)
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"gateway.signing_secret has {len(secret)} characters and needs {MIN_SECRET}: give it a"
            " random one, as `openssl rand -hex 32` makes"
        )
    revoked_before = {env: at.timestamp() for env, at in settings.revoked_before.items()}
    return RunKeys(secret, run.run, revoked_before)


def session_in_metadata(metadata: object) -> SessionName | None:
    """The session that a call's metadata name, as ENV.SESSION; None: they name none."""
    if not isinstance(metadata, dict):
        return None
    named = str(cast(dict[str, object], metadata).get(SESSION_FIELD, ""))
    env, _, session = named.partition(".")
    return SessionName(env, session) if SESSION_ID.fullmatch(session) else None


def local_secret(directory: Path) -> bytes:
    """The secret of a run whose run file names none: the same for all replicas on this machine, and
    after a restart.
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
