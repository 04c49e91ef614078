from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.learner.adapter_base import base_manifest, write_base
from streamrl.learner.files import export
from streamrl.learner.files.tensor_files import BFLOAT16
from streamrl.learner.model import model
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.weights.files import describe
from tests.learner.conftest import CONTEXT


def exported(origin: Path, directory: Path) -> Path:
    """The model of `origin`, through Levanter and out again."""
    with use_mesh():
        export.save(export.state_dict(model.load(origin, CONTEXT)), origin, directory)
    return directory


def test_a_model_comes_out_as_it_went_in(tiny: Path, tmp_path: Path):
    before = load_file(tiny / export.WEIGHTS)
    after = load_file(exported(tiny, tmp_path / "out") / export.WEIGHTS)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == np.float32
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


def test_the_same_model_gives_the_same_bytes(tiny: Path, tmp_path: Path):
    one = exported(tiny, tmp_path / "one")
    two = exported(tmp_path / "one", tmp_path / "two")
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {
        p.name: p.read_bytes() for p in two.iterdir()
    }


def test_settings_and_tokenizer_go_along(tiny: Path, tmp_path: Path):
    out = exported(tiny, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {path.name for path in tiny.iterdir()}
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (tiny / "config.json").read_text()
    )
    assert len(model.load_tokenizer(out)) == 16


TOOLS = "{{ bos_token }}TOOLS{% for m in messages %}{{ m['content'] }}{% endfor %}"


def with_named_templates(origin: Path, directory: Path, form: str) -> Path:
    """A copy whose tokenizer has the chat templates `default` and `tool_use`, in files as
    transformers 4.5 and 5 write them, or in a list in its config as before.
    """
    shutil.copytree(origin, directory)
    tokenizer = model.load_tokenizer(origin)
    plain = tokenizer.chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": TOOLS}
    tokenizer.save_pretrained(directory, save_jinja_files=form == "files")
    if form == "list":
        (directory / "chat_template.jinja").unlink(missing_ok=True)
    return directory


@pytest.mark.parametrize("form", ["files", "list"])
def test_named_chat_templates_go_along(form: str, tiny: Path, tmp_path: Path):
    origin = with_named_templates(tiny, tmp_path / "origin", form)
    out = exported(origin, tmp_path / "out")
    (tmp_path / "base").mkdir()
    write_base(origin, tmp_path / "base")
    has_files = (origin / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert has_files is (form == "files")
    wanted = {"default": model.load_tokenizer(tiny).chat_template, "tool_use": TOOLS}
    for directory in (origin, out, tmp_path / "base"):
        assert model.load_tokenizer(directory).chat_template == wanted
    assert describe(tmp_path / "base") == base_manifest(origin)


def test_a_tied_head_is_written_and_read(tiny: Path, tmp_path: Path):
    """Without `lm_head.weight` vLLM on a CPU keeps the head it started with, at every swap, and
    says nothing.
    """
    tied = tmp_path / "tied"
    shutil.copytree(tiny, tied)
    weights = load_file(tiny / export.WEIGHTS)
    del weights[export.HEAD]
    save_file(weights, tied / export.WEIGHTS)
    (tied / "config.json").write_text(
        json.dumps(json.loads((tiny / "config.json").read_text()) | {"tie_word_embeddings": True})
    )
    out = exported(tied, tmp_path / "out")
    found = load_file(out / export.WEIGHTS)
    np.testing.assert_array_equal(found[export.HEAD], weights[export.EMBEDDING])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_size_is_known_beforehand(tiny: Path):
    with use_mesh():
        size_bytes = export.local_weights(model.load(tiny, CONTEXT)).size_bytes
    assert size_bytes == sum(tensor.nbytes for tensor in load_file(tiny / export.WEIGHTS).values())


def test_a_bfloat16_export_has_the_rounded_values_and_names_its_data_type(
    tiny: Path, tmp_path: Path
):
    with use_mesh():
        weights = export.local_weights(model.load(tiny, CONTEXT), dtype=BFLOAT16)
    export.save_settings(weights, tiny, tmp_path)
    weights.write_files(tmp_path, tmp_path)
    found = load_file(tmp_path / export.WEIGHTS)
    for name, tensor in load_file(tiny / export.WEIGHTS).items():
        assert found[name].dtype == BFLOAT16
        np.testing.assert_array_equal(found[name], tensor.astype(BFLOAT16), err_msg=name)
    assert weights.size_bytes == sum(tensor.nbytes for tensor in found.values())
    assert export.export_config({"dtype": "float32"}, BFLOAT16)["dtype"] == "bfloat16"


def test_a_large_model_is_several_files_of_about_the_same_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 100)
    assert export.split_into_files({"a": 150, "b": 49}) == {"model.safetensors": ["a", "b"]}
    # 300 bytes are three files: each ends where its third of the bytes is full
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert export.split_into_files({"a": 60, "b": 60, "c": 80, "d": 90, "e": 10}) == {
        first: ["a", "b"],
        second: ["c"],
        third: ["d", "e"],
    }
    assert len(export.split_into_files({str(i): 100 for i in range(1000)})) == export.SHARDS
    assert len(export.split_into_files({"large": 900, "small": 1})) == 2  # a tensor is never cut


def test_several_files_are_read_as_one_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(export, "SHARD_BYTES", 10_000)
    out = exported(tiny, tmp_path / "out")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 and sum(len(load_file(file)) for file in files) == len(
        load_file(tiny / export.WEIGHTS)
    )
    assert json.loads((out / export.INDEX).read_text())["weight_map"] == {
        name: file.name for file in files for name in load_file(file)
    }
    monkeypatch.undo()
    assert (exported(out, tmp_path / "again") / export.WEIGHTS).read_bytes() == (
        tiny / export.WEIGHTS
    ).read_bytes()


def test_a_full_disk_is_an_oserror(tiny: Path, tmp_path: Path):
    (tmp_path / export.WEIGHTS).symlink_to("/dev/full")
    with use_mesh(), pytest.raises(OSError, match="No space left on device") as caught:
        export.save_weights(export.state_dict(model.load(tiny, CONTEXT)), tmp_path)
    assert caught.value.errno == errno.ENOSPC
