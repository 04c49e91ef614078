"""Chat templates, and the tokens at which servers stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamrl.inference.clients.end_of_turn import end_of_turn_problem, stop_tokens
from streamrl.learner.initial import tiny_tokenizer
from streamrl.system.errors import ModelError

PUBLISHED = Path(__file__).parents[2] / "learner" / "published"
# The ids of tiny_tokenizer(chat="turns"): <pad> 0, <bos> 1, <eos> 2, <unk> 3, then <system> 4,
# <user> 5, <assistant> 6 and <tool> 7.
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<tool>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def directory(tmp_path: Path, template: str | None = None, **files: Any) -> Path:
    """A model directory without weights. `files`: contents by the name without its ending."""
    tokenizer = tiny_tokenizer("0123456789+=", "turns")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    for name, content in {"config": {"eos_token_id": 2}, **files}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_a_template_that_ends_with_the_tokenizers_eos_is_right(tmp_path: Path):
    assert end_of_turn_problem(directory(tmp_path)) == ""


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"generation_config": {"eos_token_id": 2}},
        {"generation_config": {"eos_token_id": [2, 3]}},
        # As in vLLM, config.json counts only where there is no generation_config.json.
        {"generation_config": {}, "config": {"eos_token_id": [2, 7]}},
    ],
)
def test_a_template_that_ends_with_another_token_is_named(files: dict[str, Any], tmp_path: Path):
    problem = end_of_turn_problem(directory(tmp_path, CHATML, **files))
    assert problem.startswith(
        f"model directory {tmp_path}: its chat template ends an answer with '<tool>' (7), and"
    )
    assert problem.endswith("; add 7 to eos_token_id in generation_config.json")


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": [2, 7]}},
        {"generation_config": {"eos_token_id": 7}},
        {"config": {"eos_token_id": [2, 7]}},
    ],
)
def test_a_token_that_servers_stop_at_is_right(files: dict[str, Any], tmp_path: Path):
    assert end_of_turn_problem(directory(tmp_path, CHATML, **files)) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    ],
)
def test_a_template_that_ends_answers_with_nothing_is_left_alone(template: str, tmp_path: Path):
    assert end_of_turn_problem(directory(tmp_path, template)) == ""


def test_a_template_that_cannot_write_a_conversation_is_named(tmp_path: Path):
    problem = end_of_turn_problem(directory(tmp_path, "{{ raise_exception('no') }}"))
    assert "its chat template cannot write a question and an answer (TemplateError: no" in problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"eos_token_id": "</s>"}',
            r'eos_token_id in generation_config\.json is "</s>", and must',
        ),
        ('{"eos_token_id": [2, "3"]}', r"eos_token_id in generation_config\.json is \[2, "),
        ("{", r"generation_config\.json cannot be read"),
        ("[[]]", r"eos_token_id in generation_config\.json is \[\[\]\]"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_refused(
    content: str, message: str, tmp_path: Path
):
    made = directory(tmp_path)
    (made / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=f"^model directory {tmp_path}: {message}"):
        end_of_turn_problem(made)


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("llama-3.2-1b-instruct", {128001, 128008, 128009}),
        ("qwen2.5-0.5b-instruct", {151645, 151643}),
        ("gemma-2b-it", {1}),
        ("gemma-2-2b-it", {1, 107}),
        ("deepseek-coder-1.3b", {32021}),
    ],
)
def test_the_stop_tokens_of_published_models(name: str, stops: set[int]):
    assert stop_tokens(PUBLISHED / name) == stops


def test_a_tokenizer_that_cannot_be_loaded_is_refused(tmp_path: Path):
    made = directory(tmp_path)
    (made / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=f"^model directory {tmp_path}: its tokenizer cannot be"):
        end_of_turn_problem(made)
    shutil.rmtree(made)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        end_of_turn_problem(made)
