"""The key that `streamrl gateway-key` prints."""

from __future__ import annotations

import time

from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import Key, Right, keys_of
from streamrl.system.errors import ConfigError
from streamrl.system.text import nearest_or_all

DAY_S = 86_400.0


def make_key(run: RunFile, env: str | None, right: Right, days: float) -> str:
    """A key for all sessions of an env, or of the only one that has sessions. Raises ConfigError if
    there is no such env.
    """
    names = run.session_envs
    if env is None and len(names) == 1:
        env = names[0]
    if env is None:
        raise ConfigError(
            f"run {run.run}: name the env of the key; those with sessions are"
            f" {', '.join(names) or 'none'}"
        )
    if env not in names:
        raise ConfigError(
            f"envs.{env}: no env of run {run.run} that has sessions; {nearest_or_all(env, names)}"
        )
    return keys_of(run).make(Key(right, env, ""), time.time(), days * DAY_S)
