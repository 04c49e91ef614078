"""Which model a batch is measured from, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.learner import TinyModel
from streamrl.config.sections.operation import Fork
from streamrl.learner.initial import write_tiny
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.learner.reference import (
    EXTERNAL,
    ReferenceModel,
    reference_version,
    static_reference_dir,
)
from streamrl.system.errors import ModelError
from tests.learner.conftest import CONTEXT, TINY


def run_of(**reference: Any) -> RunFile:
    return run_with({"learner": {"kl": {"reference": reference}}})


def run_with(settings: dict[str, Any]) -> RunFile:
    return parse(
        {
            "run": "r",
            "envs": {"copy": {}},
            "model": {"max_seq_len": CONTEXT},
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("learner", "versions"),
    [
        ({"kl": {}}, [0, 0, 0, 0, 0, 0, 0]),
        ({"kl": {"reference": {"path": "m"}}}, [EXTERNAL] * 7),
        ({"kl": {"reference": {"every": 3}}}, [0, 0, 0, 3, 3, 3, 6]),
        ({"kl": {"reference": {"every": 1}}}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_it_follows_from_the_number_of_the_batch(learner: dict[str, Any], versions: list[int]):
    run = run_with({"learner": learner})
    assert [reference_version(run, batch) for batch in range(7)] == versions


def test_one_that_follows_begins_anew_in_a_fork_and_a_fixed_one_stays():
    fork = {"fork": Fork(run="parent", version=4, sha256="ab")}
    assert [
        reference_version(run_of(every=3).model_copy(update=fork), batch) for batch in range(4, 8)
    ] == [4, 4, 6, 6]
    assert reference_version(run_of().model_copy(update=fork), 4) == 0


def test_it_is_loaded_when_it_changes(tiny: Path):
    reference = ReferenceModel(run_of(every=2), tokenizer_ids=16)
    assert [reference.version_to_load(batch) for batch in (0, 1, 2)] == [0, 0, 2]
    with use_mesh():
        reference.load(2, tiny)
    assert [reference.version_to_load(batch) for batch in (1, 2, 3, 4)] == [0, None, None, 4]


def test_a_model_with_fewer_tokens_is_no_reference(tmp_path: Path):
    small = write_tiny(
        tmp_path / "small", TinyModel(**{**TINY.model_dump(), "alphabet": "01"}), CONTEXT
    )
    run = run_of(path=str(small))
    assert static_reference_dir(run, EXTERNAL) == small and static_reference_dir(run, 3) is None
    with (
        use_mesh(),
        pytest.raises(
            ModelError,
            match=(
                r"^reference .*small knows token ids below 6, the policy's tokenizer those below"
                r" 16; "
            ),
        ),
    ):
        ReferenceModel(run, tokenizer_ids=16).load(EXTERNAL, small)
    with pytest.raises(
        ModelError, match="learner.kl.reference.path: model directory nowhere does not exist"
    ):
        static_reference_dir(run_of(path="nowhere"), EXTERNAL)
