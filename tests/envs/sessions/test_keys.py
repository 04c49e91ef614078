from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.keys import (
    Key,
    KeyRefused,
    RunKeys,
    keys_of,
    local_secret,
    session_in_metadata,
)
from streamrl.system.errors import ConfigError

KEYS = RunKeys(b"secret", "run")
SAMPLE = Key("sample", "a-b", "s_1")


def refusal(keys: RunKeys, text: str, now_s: float = 150.0) -> str:
    with pytest.raises(KeyRefused) as refused:
        keys.check(text, now_s)
    return str(refused.value)


def test_a_key_is_for_one_right_env_and_session_until_it_expires():
    for key in (SAMPLE, Key("grade", "a-b", "s_1"), Key("open", "a-b", "")):
        text = KEYS.make(key, now_s=100.0, valid_s=60.0)
        assert KEYS.check(text, now_s=159.0) == key
        assert refusal(KEYS, text, now_s=160.0) == "it has expired"


def test_no_part_of_a_key_can_be_changed():
    text = KEYS.make(SAMPLE, now_s=100.0, valid_s=60.0)
    assert text.startswith("sk-sample.run.a-b.s_1.100.160.")
    for old, new in (
        ("sample", "grade"),
        ("sample", "open"),
        (".run.", ".other."),
        ("a-b", "a"),
        ("s_1", "s_2"),
        ("s_1", ""),
        (".100.", ".101."),
        (".160.", ".9999."),
    ):
        assert refusal(KEYS, text.replace(old, new)) == "it is no key of run run"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-",
        "sk-ä.ö.ü",
        "sk-sample.run.a.s.1.2",
        "sk-sample.run.a.s.x.y.z",
        "secret",
        "sk-......",
    ],
)
def test_any_other_text_is_no_key(text: str):
    assert refusal(KEYS, text).startswith("it is no key")


def test_a_shortened_key_and_one_of_another_secret_or_run_are_refused():
    text = KEYS.make(SAMPLE, 100.0, 60.0)
    others = [RunKeys(b"other", "run"), RunKeys(b"secret", "run-2")]
    wrong = [text[:-1], text + "0", text.removeprefix("sk-")]
    wrong += [keys.make(SAMPLE, 100.0, 60.0) for keys in others]
    assert all(refusal(KEYS, each) for each in wrong)


def test_keys_of_an_env_that_were_made_before_a_time_are_revoked():
    keys = RunKeys(b"secret", "run", {"a-b": 120.0})
    text = keys.make(SAMPLE, 100.0, 900.0)
    assert refusal(keys, text).startswith("it is revoked")
    for key in (SAMPLE._replace(env="other"), SAMPLE):
        made_s = 100.0 if key.env == "other" else 120.0
        assert keys.check(keys.make(key, made_s, 900.0), 150.0) == key


def run_of(directory: Path, **gateway: object) -> RunFile:
    return run_file.parse(
        {
            "run": "r",
            "runs_dir": str(directory),
            "envs": {"a": {"kind": "copy-digits", "sessions": {}}},
            "gateway": gateway,
        }
    )


def test_a_short_signing_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_of(tmp_path, signing_secret="env:GATEWAY_SECRET")
    monkeypatch.setenv("GATEWAY_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="has 7 characters and needs 32"):
        keys_of(run)
    monkeypatch.setenv("GATEWAY_SECRET", "0123456789abcdef" * 2)
    text = keys_of(run).make(SAMPLE, 100.0, 60.0)
    assert keys_of(run).check(text, 100.0) == SAMPLE
    assert not (run.directory / "gateway.key").exists()


def test_the_signing_secret_itself_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = "0123456789abcdef" * 2
    monkeypatch.setenv("GATEWAY_SECRET", secret)
    keys = keys_of(run_of(tmp_path, signing_secret="env:GATEWAY_SECRET"))
    assert refusal(keys, secret) == "it is no key of a gateway"


def test_the_run_file_revokes_keys_by_a_time_with_its_zone(tmp_path: Path):
    run = run_of(tmp_path, revoked_before={"a": "1970-01-01T00:02:00Z"})
    key = Key("open", "a", "")
    old = keys_of(run).make(key, 119.0, 900.0)
    assert refusal(keys_of(run), old).startswith("it is revoked")
    assert keys_of(run).check(keys_of(run).make(key, 120.0, 900.0), 150.0) == key
    with pytest.raises(ConfigError, match="timezone"):
        run_of(tmp_path, revoked_before={"a": "2026-01-01T00:00:00"})


def test_the_secret_of_a_run_is_the_same_for_all_who_begin_at_once(tmp_path: Path):
    found = list[bytes]()
    directory = tmp_path / "run"
    threads = [
        threading.Thread(target=lambda: found.append(local_secret(directory))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 64
    (file,) = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_metadata_name_one_session_or_none():
    name = session_in_metadata({"streamrl_session": "a-b.s_1"})
    assert name == ("a-b", "s_1") and str(name) == "a-b.s_1"
    for metadata in (None, [], {}, {"streamrl_session": "a.b.c"}, {"streamrl_session": "a"}):
        assert session_in_metadata(metadata) is None
