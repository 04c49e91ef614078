from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.system.errors import WeightError
from streamrl.weights.manifest import (
    MANIFEST,
    Manifest,
    WeightFile,
    differences,
    from_bytes,
    is_allowed,
    is_plain_filename,
    to_bytes,
    tokenizer_files,
)

# SHA-256 of "abc", FIPS 180-2
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_bytes_to_manifest_and_back():
    manifest = Manifest((WeightFile("model.safetensors", 3, ABC),))
    assert from_bytes(to_bytes(manifest), "here") == manifest


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0", MANIFEST]
)
def test_a_name_that_leaves_the_directory_is_refused(name: str):
    assert not is_plain_filename(name)
    with pytest.raises(WeightError, match="not a plain file name"):
        from_bytes(to_bytes(Manifest((WeightFile(name, 1, ABC),))), "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"files": 3}',
        b'{"files": [{"name": "a"}]}',
        b"\xff\xfe",
        b"null",
        b'{"files": [{"name": "a", "size_bytes": Infinity, "sha256": ""}]}',
        b"[" * 200_000,
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes):
    with pytest.raises(WeightError, match="here is not a manifest"):
        from_bytes(data, "here")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_x.py", "model.safetensors.so"])
def test_a_file_that_is_no_weights_is_refused(name: str):
    with pytest.raises(WeightError, match=f"here names '{name}', and weights have no file"):
        from_bytes(to_bytes(Manifest((WeightFile(name, 1, ABC),))), "here")


@pytest.mark.parametrize(
    "name",
    [
        "additional_chat_templates/../x.jinja",
        "additional_chat_templates/a/b.jinja",
        "additional_chat_templates/",
        "additional_chat_templates/..",
        "elsewhere/tool_use.jinja",
    ],
)
def test_a_named_chat_template_stays_in_its_directory(name: str):
    with pytest.raises(WeightError, match="not a plain file name"):
        from_bytes(to_bytes(Manifest((WeightFile(name, 1, ABC),))), "here")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("additional_chat_templates/tool_use.jinja", True),
        ("additional_chat_templates/module.py", False),
        ("additional_chat_templates/model.safetensors", False),
        ("additional_chat_templates", False),
        ("chat_template.jinja", True),
        ("tool_use.jinja", False),
    ],
)
def test_a_named_chat_template_is_a_file_of_the_tokenizer(name: str, allowed: bool):
    assert is_allowed(name) is allowed


def test_the_files_of_a_tokenizer_are_those_that_are_there(tmp_path: Path):
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("rag.jinja", "tool_use.jinja", "notes.txt"):
        (tmp_path / "additional_chat_templates" / name).write_text("")
    for name in ("tokenizer.json", "config.json", "README.md"):
        (tmp_path / name).write_text("")
    assert tokenizer_files(tmp_path) == [
        "tokenizer.json",
        "additional_chat_templates/rag.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]


def test_differences_name_the_file_and_both_hashes():
    expected = [WeightFile("a", 1, "aa"), WeightFile("b", 2, "bb"), WeightFile("c", 3, "cc")]
    found = [WeightFile("c", 3, "cc"), WeightFile("b", 1, "xx")]
    assert differences(expected, found) == [
        "a is missing",
        "b has 1 bytes with sha256 xx, announced are 2 bytes with sha256 bb",
    ]
    assert differences(expected, expected) == []
