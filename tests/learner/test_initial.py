from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from streamrl.config import run_file
from streamrl.config.sections.learner import TinyModel
from streamrl.learner import initial
from streamrl.learner.initial import initial_model_dir, tiny_tokenizer, write_tiny
from streamrl.learner.model.model import load_tokenizer
from streamrl.system.errors import ModelError
from tests.learner.conftest import CONTEXT, TINY

QUICKSTART = Path(__file__).parents[2] / "deploy" / "runs" / "quickstart.yaml"


def test_a_prompt_is_bos_and_the_message():
    tokenizer = tiny_tokenizer("0123456789+=")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47="}], add_generation_prompt=True
    )
    assert ids == [1, 8, 11, 15] and tokenizer.convert_ids_to_tokens(ids) == [
        "<bos>",
        "4",
        "7",
        "=",
    ]
    assert tokenizer.decode([8, 11, tokenizer.eos_token_id]) == "47<eos>"
    assert tokenizer.decode([8, 11, tokenizer.eos_token_id], skip_special_tokens=True) == "47"


def test_a_conversation_marks_its_turns_and_keeps_what_was_said():
    tokenizer = tiny_tokenizer("47=", "turns")
    talk = [{"role": "user", "content": "47="}]
    asked = tokenizer.apply_chat_template(talk, add_generation_prompt=True)
    assert tokenizer.convert_ids_to_tokens(asked) == [
        "<bos>",
        "<user>",
        "4",
        "7",
        "=",
        "<eos>",
        "<assistant>",
    ]
    more = [*talk, {"role": "assistant", "content": "7"}, {"role": "tool", "content": "4"}]
    assert (
        tokenizer.decode(
            tokenizer.apply_chat_template(more, add_generation_prompt=True)[len(asked) :]
        )
        == "7<eos><tool>4<eos><assistant>"
    )
    assert len(tokenizer) == 4 + 4 + 3 and TinyModel().chat == "plain"


@pytest.mark.parametrize("alphabet", ["0123456789+=", "ab ba", "é\n<>x", "日本"])
def test_every_character_is_a_token_and_comes_back(alphabet: str):
    tokenizer = tiny_tokenizer(alphabet)
    assert len(tokenizer) == 4 + len(set(alphabet))
    ids = tokenizer.encode(alphabet, add_special_tokens=False)
    assert len(ids) == len(alphabet) and tokenizer.decode(ids) == alphabet
    assert tokenizer.encode("§", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_vocabulary_is_the_tokenizers(tiny: Path):
    settings = json.loads((tiny / "config.json").read_text())
    weights = load_file(tiny / "model.safetensors")
    assert settings["vocab_size"] == len(load_tokenizer(tiny)) == 16
    assert (
        weights["lm_head.weight"].shape
        == weights["model.embed_tokens.weight"].shape
        == (16, TINY.hidden)
    )
    assert settings["tie_word_embeddings"] is False and settings["eos_token_id"] == 2


def test_the_first_policy_is_close_to_uniform(tiny: Path):
    weights = load_file(tiny / "model.safetensors")
    assert np.std(weights["lm_head.weight"]) < 0.3 * np.std(
        weights["model.layers.0.self_attn.q_proj.weight"]
    )


def test_the_same_seed_gives_the_same_bytes(tiny: Path, tmp_path: Path):
    again = write_tiny(tmp_path / "again", TINY, CONTEXT)
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {
        p.name: p.read_bytes() for p in tiny.iterdir()
    }
    other = write_tiny(tmp_path / "other", TINY.model_copy(update={"seed": 2}), CONTEXT)
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()


def test_a_run_makes_its_model_once(tmp_path: Path):
    run = run_file.load(QUICKSTART, [f"runs_dir={tmp_path}", "model.tiny={hidden: 32, layers: 1}"])
    left = tmp_path / "quickstart" / "model.tmp"
    left.mkdir(parents=True)
    (left / "half").write_text("of a process that died")
    directory = initial_model_dir(run)
    made = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert not left.exists() and "half" not in made
    assert {path.name: path.stat().st_mtime_ns for path in initial_model_dir(run).iterdir()} == made


def test_processes_that_begin_together_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_file.load(QUICKSTART, [f"runs_dir={tmp_path}"])
    made = list[Path]()

    def slowly(directory: Path, *settings: Any) -> Path:
        directory.mkdir()  # fails where another is at work
        made.append(directory)
        time.sleep(0.1)
        return directory

    monkeypatch.setattr(initial, "write_tiny", slowly)
    with ThreadPoolExecutor(4) as several:
        assert {
            future.result() for future in [several.submit(initial_model_dir, run) for _ in range(4)]
        } == {tmp_path / "quickstart" / "model"}
    assert len(made) == 1


def test_a_model_that_is_named_is_used_as_it_is(tiny: Path, tmp_path: Path):
    assert initial_model_dir(run_file.load(QUICKSTART, [f"model.path={tiny}"])) == tiny
    with pytest.raises(
        ModelError, match=f"model.path: model directory {tmp_path}/none does not exist"
    ):
        initial_model_dir(run_file.load(QUICKSTART, [f"model.path={tmp_path}/none"]))
