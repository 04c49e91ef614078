from __future__ import annotations

from click.testing import CliRunner

from streamrl.cli.command import cli


def test_one_version_and_all_exclude_each_other():
    result = CliRunner().invoke(cli, ["eval", "r", "--version", "3", "--all"])
    assert result.exit_code == 2 and "--version and --all exclude each other" in result.stderr
