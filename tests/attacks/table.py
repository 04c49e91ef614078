"""Attacks on streamrl's own defences, each tried for real. `make attacks` prints them as a table.

An attack is a function that tries to do harm in a directory of its own and says what it did: an
empty string when the defence held, and otherwise one line with the harm. `python -m tests.attacks`
exits with 1 if any attack did harm, and makes each again as a plain user where it runs as root.
`test_attacks.py` runs the same list within `make test`, so an attack takes a second or less.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Modules of this package, each with a tuple ATTACKS. A new one is added here.
MODULES = ("sandbox", "scorers", "foreign", "servers", "gateway", "run_files")


class Attack(NamedTuple):
    """One attack on one place."""

    review: str  # number in the security review, as S3
    name: str  # what is tried, in a few words; unique
    where: str  # the module that is to hold, as envs/sandbox/programs.py
    attempt: Callable[[Path], str]  # of an empty directory: the harm in one line; "" when it held


def attacks() -> list[Attack]:
    """Every attack, in the order of the modules. Raises ValueError where two have one name."""
    found: list[Attack] = []
    for module in MODULES:
        found += importlib.import_module(f"tests.attacks.{module}").ATTACKS
    names = [attack.name for attack in found]
    if double := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two attacks are called {', '.join(sorted(double))}")
    return found


def harm(attack: Attack, directory: Path) -> str:
    """What the attack did: "" when it held. An attempt that raises has shown nothing, so that
    counts as harm.
    """
    try:
        return attack.attempt(directory)
    except Exception as error:
        return f"the attack itself failed: {type(error).__name__}: {error}"
