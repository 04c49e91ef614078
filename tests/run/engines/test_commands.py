from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from streamrl.run.engines.commands import output
from streamrl.system.errors import StreamrlError


def test_a_command_prints_what_it_makes_of_its_input():
    assert output([sys.executable, "-c", "print(input() * 2)"], "ab") == "abab\n"


def test_ctrl_c_in_the_terminal_does_not_reach_a_command():
    session = output([sys.executable, "-c", "import os; print(os.getsid(0))"])
    assert int(session) != os.getsid(0)


def test_its_complaint_or_else_its_exit_code_is_the_error():
    with pytest.raises(StreamrlError, match="^sh: refused$"):
        output(["sh", "-c", "echo refused >&2; exit 3"])
    with pytest.raises(StreamrlError, match="^sh: 3$"):
        output(["sh", "-c", "exit 3"])


def test_a_command_that_is_not_installed_is_an_error_with_a_hint(tmp_path: Path):
    missing = str(tmp_path / "squeue")
    with pytest.raises(StreamrlError, match="squeue is not installed here; ask for it$"):
        output([missing], hint="; ask for it")
