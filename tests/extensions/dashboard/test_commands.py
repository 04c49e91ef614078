from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "streamrl.extensions.dashboard.server", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    result = CliRunner().invoke(cli, ["dashboard", "r"])
    assert result.exit_code == 2 and "install streamrl[dashboard]" in result.stderr
