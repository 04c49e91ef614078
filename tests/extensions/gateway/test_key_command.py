from __future__ import annotations

import time
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import Key, KeyRefused, keys_of
from streamrl.extensions.gateway.key_command import make_key
from streamrl.system.errors import ConfigError


def run_of(directory: Path, *envs: str) -> RunFile:
    settings = {"kind": "copy-digits", "sessions": {}}
    described = {"copy-digits": {}, **dict.fromkeys(envs, settings)}
    return run_file.parse({"run": "r", "runs_dir": str(directory), "envs": described})


def test_a_key_is_for_the_only_env_with_sessions_or_the_one_that_is_named(tmp_path: Path):
    run = run_of(tmp_path, "agent")
    keys = keys_of(run)
    text = make_key(run, None, "open", days=2.0)
    assert keys.check(text, time.time() + 86_400) == Key("open", "agent", "")
    with pytest.raises(KeyRefused, match="expired"):
        keys.check(text, time.time() + 2 * 86_400)
    sampling = make_key(run_of(tmp_path, "agent", "other"), "other", "sample", days=2.0)
    assert keys.check(sampling, time.time()) == Key("sample", "other", "")


@pytest.mark.parametrize(
    ("envs", "named", "cause"),
    [
        (("a", "b"), None, "name the env of the key; those with sessions are a, b"),
        ((), None, "those with sessions are none"),
        (("a",), "copy-digits", "envs.copy-digits: no env of run r that has sessions"),
    ],
)
def test_another_env_is_refused(
    tmp_path: Path, envs: tuple[str, ...], named: str | None, cause: str
):
    with pytest.raises(ConfigError, match=cause):
        make_key(run_of(tmp_path, *envs), named, "open", days=1.0)
