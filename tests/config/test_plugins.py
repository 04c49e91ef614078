from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.plugins import Plugin, import_path, imports_in, is_import, plugins
from streamrl.config.run_file import parse
from streamrl.run.monitoring.sinks import runner
from streamrl.system.errors import ConfigError
from tests.support.packages import install


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


def test_an_installed_package_adds_names_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = "raise SystemExit('imported')"
    install(monkeypatch, tmp_path, "some-envs", code, envs={"sudoku": "some_envs:Sudoku"})
    assert plugins("streamrl.envs")["sudoku"] == Plugin("some_envs:Sudoku", "some-envs 1.0")
    assert "sudoku" not in plugins("streamrl.rewards")


def test_a_name_that_two_packages_add_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, tmp_path / "a", "first", envs={"sudoku": "first:Env"})
    install(monkeypatch, tmp_path / "b", "second", envs={"sudoku": "second:Env"})
    with pytest.raises(ConfigError, match="'sudoku' in streamrl.envs is added by .* and by"):
        plugins("streamrl.envs")


def test_a_sink_of_an_installed_package_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"run": "r", "envs": {"copy-digits": {}}, "orchestrator": {"sinks": ["carrier"]}}
    with pytest.raises(ConfigError, match="carrier"):
        parse(settings)
    code = "class Pigeon:\n    def __init__(self, context): pass\n"
    install(monkeypatch, tmp_path, "pigeons", code, sinks={"carrier": "pigeons:Pigeon"})
    run = parse(settings)
    runner.check(run.orchestrator.sinks)
