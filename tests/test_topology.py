"""What the rooms say they read and write is what the templates in topics/ say of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from streamrl.log import topics
from streamrl.log.topics import Kind

PACKAGE = Path(__file__).parents[1] / "streamrl"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/process.py"))
OWN = {"journal"}  # read by the part itself when it starts, not in its loop


def declared(room: str, name: str) -> set[str]:
    """The constant of a room's process.py, read without importing what the room needs."""
    for node in ast.parse((PACKAGE / room / "process.py").read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name
        ):
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"streamrl/{room}/process.py has no {name}")


def disagreements(
    room: str, consumes: set[str], produces: set[str], kinds: Mapping[str, Kind]
) -> set[str]:
    readers = {name for name, kind in kinds.items() if room in kind.readers} - OWN
    writers = {name for name, kind in kinds.items() if room in kind.writers}
    return {f"{room} reads {topic}" for topic in readers ^ consumes} | {
        f"{room} writes {topic}" for topic in writers ^ produces
    }


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_and_templates_agree(room: str):
    assert (
        disagreements(room, declared(room, "CONSUMES"), declared(room, "PRODUCES"), topics.kinds())
        == set()
    )


def test_templates_name_rooms_only():
    """A misspelled room would agree with nobody and be missed by nobody."""
    named = {name for kind in topics.kinds().values() for name in kind.readers + kind.writers}
    assert named <= set(ROOMS)


def test_a_disagreement_is_found():
    consumes, produces = (
        declared("buffer", "CONSUMES") | {"batches"},
        declared("buffer", "PRODUCES") - {"fates"},
    )
    assert disagreements("buffer", consumes, produces, topics.kinds()) == {
        "buffer reads batches",
        "buffer writes fates",
    }
