from __future__ import annotations

import pytest

from streamrl.config.plugins import import_path, imports_in, is_import
from streamrl.errors import ConfigError


def test_an_object_is_imported_by_its_module_and_its_name():
    assert import_path(f"{__name__}:mine", "learner.loss", ["ppo"]) is mine


def mine() -> None: ...


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("ppoo", "learner.loss: 'ppoo' is not known; did you mean 'ppo'"),
        ("nowhere:mine", "learner.loss: 'nowhere:mine' cannot be imported .*on PYTHONPATH"),
        (f"{__name__}:gone", f"learner.loss: module '{__name__}' has no 'gone'"),
    ],
)
def test_what_is_not_there_is_named_with_its_setting(path: str, says: str):
    with pytest.raises(ConfigError, match=says):
        import_path(path, "learner.loss", ["ppo"])


@pytest.mark.parametrize("uri", ["s3://bucket/a", "ppo", 7, None])
def test_a_uri_and_a_shipped_name_are_no_imports(uri: object):
    assert not is_import(uri)


def test_imports_are_found_however_deep_and_in_keys_too():
    settings = {"a": {"b:c": [1, ("d.py:E", "s3://x")]}, "f": "g"}
    assert list(imports_in(settings)) == ["b:c", "d.py:E"]
