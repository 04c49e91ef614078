from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from streamrl.gateway.keys import SessionKeys, local_secret, session_in_metadata
from tests.gateway.conftest import BODY, PATHS, Shared, post
from tests.support.gateways import ENV, gateways


def test_a_key_opens_its_session_only():
    keys = SessionKeys(b"secret")
    assert keys.session_of(keys.key_of("a-b", "s_1")) == ("a-b", "s_1")
    signature = keys.key_of("a", "s").rpartition(".")[2]
    wrong = [
        "",
        "sk-",
        f"sk-a.t.{signature}",
        f"sk-b.s.{signature}",
        f"a.s.{signature}",
        "sk-ä.ö.ü",
    ]
    wrong += [keys.key_of("a", "s")[:-1], SessionKeys(b"other").key_of("a", "s")]
    assert [keys.session_of(key) for key in wrong] == [None] * len(wrong)
    assert SessionKeys(b"s", "gw").opens_gateway("gw") and not SessionKeys(
        b"s", "gw"
    ).opens_gateway("ä")


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


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_key_is_401_in_the_shape_of_the_api(shared: Shared, path: str):
    for key in ("", "sk-agent.s0.wrong", shared.key + "x", shared.key.replace("s0", "s1")):
        refused = post(shared.url + path, key, json=BODY)
        assert refused.status_code == 401
        kind = refused.json()["error"]["type"]
        assert kind == "authentication_error"
        assert ("type" in refused.json()) == (path == "/v1/messages")


def test_the_gateways_key_opens_sessions_and_a_sessions_key_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GW_KEY", "gw-secret")
    with gateways(tmp_path, api_key="env:GW_KEY") as gateway:
        gateway_url = gateway.start()
        url = gateway_url + "/rl/start_session"
        opened = gateway.opened(gateway_url, {"task_id": 7}, "gw-secret")
        assert opened.status_code == 200
        assert [
            post(url, key, json={"task_id": 7}).status_code
            for key in ("", "x", opened.json()["api_key"])
        ] == [401] * 3
        assert not (gateway.run.directory / "gateway.key").exists()


def test_a_client_with_the_gateways_key_names_the_session_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GW_KEY", "gw-secret")
    with gateways(tmp_path, api_key="env:GW_KEY") as gateway:
        url = gateway.start()
        for session in ("s0", "s1"):
            body = {"task_id": "7", "session_id": session}
            assert gateway.opened(url, body, "gw-secret").status_code == 200

        def asked(named: object, key: str = "gw-secret") -> int:
            metadata = {"mine": "stays", "streamrl_session": named}
            body = {"input": "q", "metadata": metadata}
            answer = post(f"{url}/v1/responses", key, json=body)
            if answer.status_code == 200:
                assert answer.json()["metadata"] == metadata
            return answer.status_code

        assert [asked(f"{ENV}.{session}") for session in ("s0", "s1", "s1")] == [200] * 3
        assert asked(f"{ENV}.s2") == 404
        assert [asked(named) for named in ("s0", "other.s0", f"{ENV}.", 5, None)] == [401] * 5
        assert asked(f"{ENV}.s0", "another") == 401
        key = SessionKeys(b"x").key_of(ENV, "s0")
        assert asked(f"{ENV}.s0", key) == 401
        assert [call.session for call in gateway.calls()].count("s1") == 2


def test_metadata_name_one_session_or_none():
    assert session_in_metadata({"streamrl_session": "a-b.s_1"}) == ("a-b", "s_1")
    for metadata in (None, [], {}, {"streamrl_session": "a.b.c"}, {"streamrl_session": "a"}):
        assert session_in_metadata(metadata) is None
