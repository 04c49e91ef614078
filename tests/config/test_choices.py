from __future__ import annotations

import ast
from pathlib import Path

import streamrl
from streamrl.batcher.advantages import NORMALIZERS
from streamrl.buffer.advantages import ADVANTAGES
from streamrl.config import choices
from streamrl.run.monitoring.sinks.runner import NEEDS, SHIPPED


def test_the_names_of_a_run_file_are_those_of_the_functions():
    """In the same order, which is that of the error that lists them."""
    # as text: no JAX here
    source = (Path(streamrl.__file__).parent / "learner" / "loss" / "losses.py").read_text()
    assert [*choices.ADVANTAGES] == [*ADVANTAGES], "choices.py and buffer/advantages.py differ"
    assert [*choices.BATCH_NORMALIZERS] == [*NORMALIZERS], (
        "choices.py and batcher/advantages.py differ"
    )
    for name in ("LOSSES", "DIVERGENCES"):
        named = [*getattr(choices, name)]
        assert named == keys_of(source, name), (
            f"{name}: choices.py and learner/loss/losses.py differ"
        )


def keys_of(source: str, name: str) -> list[str]:
    """Keys of the dict that a module's source binds to a name."""
    (made,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    assert isinstance(made, ast.Dict)
    return [ast.literal_eval(key) for key in made.keys if key is not None]


def test_the_names_of_sinks_are_those_that_are_shipped():
    assert tuple(SHIPPED) == choices.SINKS and NEEDS.keys() <= SHIPPED.keys()
