"""What the rooms say they read and write is what the templates in topics/ say of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from streamrl import topics
from streamrl.orchestrator.observe import TOPICS
from streamrl.topics import Kind

ROOMS = ("envs", "buffer", "batcher", "learner", "inference", "orchestrator")
OWN = {"journal"}  # read by the part itself when it starts, not in its loop


def declared(room: str, name: str) -> set[str]:
    """The constant of a room's process.py, read without importing what the room needs."""
    source = (Path(__file__).parents[1] / "streamrl" / room / "process.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return set(TOPICS) if isinstance(node.value, ast.Call) else set(ast.literal_eval(node.value))
    raise AssertionError(f"streamrl/{room}/process.py has no {name}")


def disagreements(room: str, consumes: set[str], produces: set[str], kinds: Mapping[str, Kind]) -> set[str]:
    readers = {name for name, kind in kinds.items() if room in kind.readers} - OWN
    writers = {name for name, kind in kinds.items() if room in kind.writers}
    return {f"{room} reads {topic}" for topic in readers ^ consumes} | {f"{room} writes {topic}" for topic in writers ^ produces}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_and_templates_agree(room: str):
    assert disagreements(room, declared(room, "CONSUMES"), declared(room, "PRODUCES"), topics.kinds()) == set()


def test_a_disagreement_is_found():
    consumes, produces = declared("buffer", "CONSUMES") | {"batches"}, declared("buffer", "PRODUCES") - {"fates"}
    assert disagreements("buffer", consumes, produces, topics.kinds()) == {"buffer reads batches", "buffer writes fates"}
