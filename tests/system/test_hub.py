"""Repositories of a hub that runs here, and of the cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from streamrl.system.errors import HubError, ModelError
from streamrl.system.hub import (
    HubName,
    check_may_push,
    fetch,
    model_directory,
    parse,
    push,
)
from tests.support.hub import TOKEN, Hub, serving_hub, use_hub

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer_config.json": b"{ }",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"template",
    "additional_chat_templates/tool_use.jinja": b"tools",
}
OTHER_FILES = {
    "README.md": b"words",
    "consolidated.safetensors": b"the same weights again",
    "original/consolidated.00.pth": b"pickle",
    "onnx/model.safetensors": b"another format",
    "onnx/config.json": b"of another format",
    "modeling_own.py": b"code",
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": b"names of pickles",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_hub() as served:
        use_hub(monkeypatch, served.url, str(tmp_path / "cache"))
        yield served


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("google/gemma-2b@refs/pr/7", HubName("google/gemma-2b", "refs/pr/7")),
        ("a/b@v1.0", HubName("a/b", "v1.0")),
        ("gpt2", None),
        ("/models/qwen", None),
        ("./models/qwen", None),
        ("models/qwen/small", None),
        ("../models", None),
        ("a/b@", None),
        ("a/b@../c", None),
        ("a--b/c", None),
        ("", None),
    ],
)
def test_a_name_is_an_owner_and_a_name_and_may_have_a_revision(text: str, name: HubName | None):
    assert parse(text) == name
    assert name is None or str(name) == text


def test_a_model_comes_with_the_files_that_it_needs_and_no_others(hub: Hub):
    commit = hub.model("me/small", {**MODEL, **OTHER_FILES})
    snapshot = fetch(HubName("me/small"), "model")
    assert str(snapshot.name) == f"me/small@{commit}"
    assert contents(snapshot.directory) == MODEL
    assert model_directory("me/small", "model.path") == snapshot.directory


def test_a_data_set_comes_with_all_its_files_but_code(hub: Hub):
    files = {"data/train.jsonl": b"{}", "README.md": b"words"}
    commit = hub.dataset("me/sums", {**files, "sums.py": b"code"})
    snapshot = fetch(HubName("me/sums"), "dataset")
    assert snapshot.name.revision == commit and contents(snapshot.directory) == files


def test_a_revision_names_its_own_files(hub: Hub):
    hub.model("me/small", MODEL)
    old = hub.models["me/small"].commit({**MODEL, "config.json": b"old"}, "v1")
    for revision in ("v1", old):
        snapshot = fetch(HubName("me/small", revision), "model")
        assert snapshot.name.revision == old
        assert (snapshot.directory / "config.json").read_bytes() == b"old"


def test_a_commit_that_is_in_the_cache_is_used_without_a_request(hub: Hub):
    hub.model("me/small", MODEL)
    name = fetch(HubName("me/small"), "model").name
    hub.requests.clear()
    assert fetch(name, "model").name == name
    assert hub.requests == []


def test_a_commit_whose_download_was_interrupted_is_completed(hub: Hub):
    commit = hub.model("me/small", MODEL)
    (fetch(HubName("me/small"), "model").directory / "chat_template.jinja").unlink()
    cache = Path(constants.HF_HUB_CACHE) / "models--me--small"
    (cache / ".streamrl" / commit).unlink()  # As if it had been interrupted before its end.
    assert contents(fetch(HubName("me/small", commit), "model").directory) == MODEL


@pytest.mark.parametrize("switch", ["no network", "HF_HUB_OFFLINE"])
def test_without_a_network_the_cache_is_used(
    hub: Hub, switch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    commit = hub.model("me/small", MODEL)
    fetch(HubName("me/small"), "model")
    if switch == "no network":
        use_hub(monkeypatch, "http://127.0.0.1:9", str(tmp_path / "cache"))
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = fetch(HubName("me/small"), "model")
    assert snapshot.name.revision == commit and contents(snapshot.directory) == MODEL
    with pytest.raises(
        HubError,
        match=(
            f"^model me/other: it is not in the cache {tmp_path}/cache, and http.* cannot be"
            " reached; download it where there is a network"
        ),
    ):
        fetch(HubName("me/other"), "model")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_refuses_for_a_while_leaves_what_the_cache_has(hub: Hub, status: int):
    commit = hub.model("me/small", MODEL)
    fetch(HubName("me/small"), "model")
    hub.outage = status
    snapshot = fetch(HubName("me/small"), "model")
    assert snapshot.name.revision == commit and contents(snapshot.directory) == MODEL
    with pytest.raises(HubError, match=r"^model me/other: it is not in the cache .* cannot be"):
        fetch(HubName("me/other"), "model")


def test_a_repository_that_is_not_there_is_refused(hub: Hub):
    with pytest.raises(
        HubError,
        match=f"^model me/nothing: no such model on {hub.url}, and no such directory here; check",
    ):
        model_directory("me/nothing", "model.path")


def test_a_revision_that_is_not_there_is_refused(hub: Hub):
    hub.model("me/small", MODEL)
    with pytest.raises(HubError, match=r"^model me/small@v9: it has no revision 'v9'; give"):
        fetch(HubName("me/small", "v9"), "model")


def test_a_gated_repository_says_where_its_terms_are(hub: Hub):
    hub.model("me/gated", MODEL, gated=True)
    with pytest.raises(
        HubError,
        match=f"^model me/gated: access is restricted; accept its terms at {hub.url}/me/gated, and",
    ):
        fetch(HubName("me/gated"), "model")


def test_what_is_neither_a_directory_nor_a_name_is_refused_without_a_request(
    hub: Hub, tmp_path: Path
):
    with pytest.raises(
        ModelError,
        match=(
            f"^model.path: model directory {tmp_path}/none does not exist; give a Hugging Face"
            " directory, or"
        ),
    ):
        model_directory(str(tmp_path / "none"), "model.path")
    assert hub.requests == []


def test_a_directory_is_preferred_to_a_repository_of_the_same_name(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    hub.model("me/small", MODEL)
    (tmp_path / "me" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_directory("me/small", "model.path") == Path("me/small") and hub.requests == []


def test_a_pushed_model_is_a_private_repository_with_these_files_alone(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, data in (("config.json", b"{}"), ("model-00001-of-00001.safetensors", b"first")):
        (tmp_path / name).write_bytes(data)
    check_may_push("me/trained")
    push(tmp_path, "me/trained", "version 1")
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    url = push(tmp_path, "me/trained", "version 2")
    repository = hub.models["me/trained"]
    commit = repository.revisions["main"]
    assert repository.private and url == f"{hub.url}/me/trained/commit/{commit}"
    assert repository.commits[commit] == {"config.json": b"{}", "model.safetensors": b"first"}


def test_a_push_without_a_token_says_which_one_is_needed(hub: Hub, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"{}")
    hub.model("me/theirs", MODEL)
    refused = f"{hub.url} refuses access ({{}}); set HF_TOKEN to a token that may"
    with pytest.raises(HubError, match=re.escape(f"model me/new: {refused.format(401)}")):
        check_may_push("me/new")
    with pytest.raises(HubError, match=re.escape(f"model me/theirs: {refused.format(403)}")):
        push(tmp_path, "me/theirs", "version 1")
    with pytest.raises(HubError, match=r"^trained is not the name of a repository on the hub"):
        check_may_push("trained")


def test_a_push_without_a_network_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    use_hub(monkeypatch, "http://127.0.0.1:9", "cache")
    with pytest.raises(
        HubError, match=r"^model me/new: http://127\.0\.0\.1:9 cannot be reached; try again where"
    ):
        check_may_push("me/new")
