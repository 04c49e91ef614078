"""The format of tool calls that a run's policy knows, by the chat template of `model.path`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from streamrl.config.choices import ToolSyntax
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.call_formats import syntax_of_template
from streamrl.system.errors import ConfigError

TOOL_TEMPLATE = "tool_use"  # the name of the template for tools, where there are several


def tool_syntax_of(run: RunFile, env: str) -> ToolSyntax:
    """`sessions.tool_syntax` of the env, or the syntax of the model's chat template where that is
    `auto`. It stays `auto` where the model is not on this machine, or its template knows no tools.

    Raises ConfigError for a template whose calls are not read.
    """
    sessions = run.envs[env].sessions
    given = sessions.tool_syntax if sessions else "auto"
    if given != "auto" or not run.model.path:
        return given
    directory = Path(run.model.path)
    try:
        return syntax_of_template(chat_template_of(directory)) or "auto"
    except ValueError as error:
        raise ConfigError(
            f"model.path {directory}: the chat template cannot be followed: {error}; set"
            f" envs.{env}.sessions.tool_syntax to how this policy shall write calls"
        ) from None


def chat_template_of(directory: Path) -> str:
    """The chat template of a model that is used where there are tools; empty if there is none.

    Raises ValueError for files that are no JSON.
    """
    files = (
        directory / "additional_chat_templates" / f"{TOOL_TEMPLATE}.jinja",
        directory / "chat_template.jinja",
    )
    for file in files:
        if file.is_file():
            return file.read_text()
    for file in (directory / "chat_template.json", directory / "tokenizer_config.json"):
        if not file.is_file():
            continue
        settings = json.loads(file.read_text())
        template = settings.get("chat_template") if isinstance(settings, dict) else None
        if isinstance(template, list):  # of several, each with its name
            named = {each["name"]: each["template"] for each in cast(list[Any], template)}
            template = named.get(TOOL_TEMPLATE) or named.get("default")
        if isinstance(template, str):
            return template
    return ""
