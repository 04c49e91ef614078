from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.learner import model
from streamrl.learner.mesh import on_mesh
from streamrl.weights import export
from tests.learner.conftest import CONTEXT


def exported(origin: Path, directory: Path) -> Path:
    """The model of `origin`, through Levanter and out again."""
    with on_mesh():
        export.save(model.load(origin, CONTEXT), origin, directory)
    return directory


def test_a_model_comes_out_as_it_went_in(tiny: Path, tmp_path: Path):
    before, after = load_file(tiny / export.WEIGHTS), load_file(exported(tiny, tmp_path / "out") / export.WEIGHTS)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == np.float32
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


def test_the_same_model_gives_the_same_bytes(tiny: Path, tmp_path: Path):
    one, two = exported(tiny, tmp_path / "one"), exported(tmp_path / "one", tmp_path / "two")
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_settings_and_tokenizer_go_along(tiny: Path, tmp_path: Path):
    out = exported(tiny, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {path.name for path in tiny.iterdir()}
    assert json.loads((out / "config.json").read_text()) == json.loads((tiny / "config.json").read_text())
    assert len(model.load_tokenizer(out)) == 16


def test_a_tied_head_is_written_and_read(tiny: Path, tmp_path: Path):
    """Without `lm_head.weight` vLLM on a CPU keeps the head it started with, at every swap, and says nothing."""
    tied = tmp_path / "tied"
    shutil.copytree(tiny, tied)
    weights = load_file(tiny / export.WEIGHTS)
    del weights[export.HEAD]
    save_file(weights, tied / export.WEIGHTS)
    (tied / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | {"tie_word_embeddings": True}))
    out = exported(tied, tmp_path / "out")
    found = load_file(out / export.WEIGHTS)
    np.testing.assert_array_equal(found[export.HEAD], weights[export.EMBEDDING])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_size_is_known_beforehand(tiny: Path):
    with on_mesh():
        size_bytes = export.size_bytes(model.load(tiny, CONTEXT))
    assert size_bytes == sum(tensor.nbytes for tensor in load_file(tiny / export.WEIGHTS).values())


def test_a_full_disk_is_an_oserror(tiny: Path, tmp_path: Path):
    (tmp_path / export.WEIGHTS).symlink_to("/dev/full")
    with on_mesh(), pytest.raises(OSError, match="No space left on device") as caught:
        export.save_weights(model.load(tiny, CONTEXT), tmp_path)
    assert caught.value.errno == errno.ENOSPC
