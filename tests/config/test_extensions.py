"""Extensions are found in their package, and a run has what they declare."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl import extensions as package
from streamrl.config import run_file, topology
from streamrl.config.extensions import extensions, modules_called
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.gateway.extension import GATEWAY
from streamrl.system.errors import ConfigError

RUN = {"run": "r", "envs": {"copy-digits": {}}}


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of an extension `another` that has no module yet."""
    directory = tmp_path / "another"
    directory.mkdir()
    (directory / "__init__.py").touch()
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield directory
    for name in [name for name in sys.modules if name.startswith(f"{package.__name__}.another")]:
        del sys.modules[name]


def test_a_package_without_a_declaration_declares_nothing(added: Path):
    assert "another" not in dict(modules_called("extension"))


def test_a_package_is_found_by_its_module(added: Path):
    (added / "commands.py").write_text("COMMANDS = (1, 2)")
    assert dict(modules_called("commands"))["another"].COMMANDS == (1, 2)


def test_the_run_file_has_the_sections_of_extensions():
    run = run_file.parse({**RUN, "gateway": {"port": 1}})
    assert run.settings_of(Gateway).port == 1
    assert run.model_dump()["gateway"]["port"] == 1
    assert run_file.parse(RUN).settings_of(Gateway) == Gateway()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gatway": {}}, "unknown key 'gatway'; did you mean 'gateway'?"),
        ({"gateway": {"prot": 1}}, "unknown key 'gateway.prot'; did you mean 'port'?"),
        ({"gateway": {"port": -1}}, "gateway.port: Input should be greater than or equal to 0"),
        ({"gateway": {"host": "0.0.0.0"}}, "set gateway.signing_secret"),
    ],
)
def test_what_is_wrong_in_a_section_is_named(settings: dict[str, object], says: str):
    with pytest.raises(ConfigError) as failed:
        run_file.parse({**RUN, **settings})
    assert says in str(failed.value)


def test_a_run_has_the_roles_of_extensions_after_those_of_the_core():
    names = [role.name for role in topology.roles()]
    core = [role.name for role in topology.CORE]
    added = [role.name for extension in extensions().values() for role in extension.roles]
    assert names == [*core, *added] and GATEWAY.name in added


def test_settings_are_read_by_the_type_of_the_section():
    run: RunFile = run_file.parse(RUN)
    assert type(run.settings_of(Gateway)) is Gateway
