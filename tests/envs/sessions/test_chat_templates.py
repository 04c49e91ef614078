"""The format of tool calls follows the chat template of the run's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.chat_templates import chat_template_of, tool_syntax_of
from streamrl.system.errors import ConfigError

HERMES = "{% if tools %}<tool_call>{% endif %}"
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}"
PLAIN = "{{ messages }}"


def run_of(path: Path | str, **sessions: Any) -> RunFile:
    envs = {"agent": {"sessions": sessions}}
    return RunFile.model_validate({"run": "r", "envs": envs, "model": {"path": str(path)}})


def write_tokenizer(directory: Path, template: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_the_template_is_found_where_transformers_writes_it(tmp_path: Path):
    assert chat_template_of(tmp_path) == ""
    write_tokenizer(tmp_path, PLAIN)
    assert chat_template_of(tmp_path) == PLAIN
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": HERMES}]
    write_tokenizer(tmp_path, named)
    assert chat_template_of(tmp_path) == HERMES
    write_tokenizer(tmp_path, named[:1])
    assert chat_template_of(tmp_path) == PLAIN
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    assert chat_template_of(tmp_path) == MISTRAL
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(HERMES)
    assert chat_template_of(tmp_path) == HERMES


def test_the_syntax_is_that_of_the_template_unless_the_run_file_gives_one(tmp_path: Path):
    write_tokenizer(tmp_path, HERMES)
    assert tool_syntax_of(run_of(tmp_path), "agent") == "json"
    assert tool_syntax_of(run_of(tmp_path, tool_syntax="brackets"), "agent") == "brackets"


@pytest.mark.parametrize("template", [PLAIN, None])
def test_any_syntax_is_read_where_the_template_knows_no_tools(tmp_path: Path, template: Any):
    write_tokenizer(tmp_path, template)
    assert tool_syntax_of(run_of(tmp_path), "agent") == "auto"
    assert tool_syntax_of(run_of(tmp_path / "elsewhere"), "agent") == "auto"
    assert tool_syntax_of(run_of(""), "agent") == "auto"


def test_a_template_whose_calls_are_not_read_is_refused_with_the_setting(tmp_path: Path):
    write_tokenizer(tmp_path, MISTRAL)
    with pytest.raises(ConfigError, match=r"Mistral.*envs\.agent\.sessions\.tool_syntax"):
        tool_syntax_of(run_of(tmp_path), "agent")
    assert tool_syntax_of(run_of(tmp_path, tool_syntax="json"), "agent") == "json"


def test_a_tokenizer_that_is_no_json_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="chat template cannot be followed"):
        tool_syntax_of(run_of(tmp_path), "agent")
