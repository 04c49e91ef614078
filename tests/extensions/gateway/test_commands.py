from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli


def test_a_key_is_printed_for_an_env_with_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("run: r\nenvs: {agents: {sessions: {}}}\n")
    made = CliRunner().invoke(cli, ["gateway-key", "r.yaml", "--sampling"], catch_exceptions=False)
    assert made.exit_code == 0 and made.stdout.startswith("sk-sample.r.agents.")


def test_a_port_is_a_port():
    result = CliRunner().invoke(cli, ["gateway", "r", "--port", "65536"])
    assert result.exit_code == 2 and "--port" in result.stderr
