"""Every attack of the table fails, and the runner says so when one does not."""

from __future__ import annotations

from pathlib import Path

import pytest

import streamrl
from tests.attacks import __main__ as runner
from tests.attacks.table import Attack, attacks, harm

PACKAGE = Path(streamrl.__file__).parent


@pytest.mark.parametrize("attack", attacks(), ids=lambda attack: attack.name.replace(" ", "-"))
def test_it_fails(attack: Attack, tmp_path: Path):
    assert harm(attack, tmp_path) == ""


def test_the_modules_that_are_to_hold_are_there():
    """`make attacks` prints them beside the attack."""
    places = {attack.where for attack in attacks()}
    assert {place for place in places if not (PACKAGE / place).is_file()} == set()


def test_an_attack_that_does_harm_is_printed_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(directory: Path) -> str:
        raise OSError("no such thing")

    made = [
        Attack("S0", "held one", "a.py", lambda directory: ""),
        Attack("S0", "done one", "b.py", lambda directory: "read a secret"),
    ]
    monkeypatch.setattr(runner, "attacks", lambda: made)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["tests.attacks"])
    assert runner.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["S0", "held", "one", "a.py", "yes"] and lines[2].endswith(
        "NO: read a secret"
    )
    monkeypatch.setattr(runner, "attacks", lambda: made[:1])
    assert runner.main() == 0
    assert harm(Attack("S0", "broken", "c.py", broken), Path()).startswith(
        "the attack itself failed: OSError"
    )
