"""The clients of other people, and how each is pointed at the gateway: one loop with a tool."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.sampling_stub import Say, tool_call
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MODULES = ROOT / ".streamrl" / "clients" / "node_modules"
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
TASK = "run echo hello"
LIMIT_S = 600.0  # of one client
# What the policy is made to write, besides the call of the client's tool.
THOUGHT = "I call the tool."
ANSWER_TEXT = "Done: it is so."
TITLE = "A short title"
STUB_TOOL_TURN = "<end><tool>"  # of the stub's prompts: how the result of a tool begins


class Start(NamedTuple):
    """How a client is started."""

    command: list[str]
    environment: Mapping[str, str] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})  # in its working directory


class Program(NamedTuple):
    """A client, and the call of a tool with which the policy is to answer it first."""

    package: str  # that has its version
    start: Callable[[str, str], Start]  # from the URL and the key
    tool: str
    arguments: dict[str, Any]


def of_sdk(name: str, package: str) -> Program:
    """An agent of a Python SDK (`sdk_clients.py`)."""

    def start(url: str, key: str) -> Start:
        return Start([str(PYTHON), str(HERE / "sdk_clients.py"), name, url, key])

    return Program(package, start, "add", {"a": 1, "b": 2})


def binary(name: str) -> str:
    return str(MODULES / ".bin" / name)


def claude_code(url: str, key: str) -> Start:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }
    return Start([binary("claude"), "-p", TASK, "--allowedTools", "Bash"], environment)


def codex(url: str, key: str) -> Start:
    provider = {"name": "streamrl", "base_url": f"{url}/v1", "wire_api": "responses"}
    options = ["model=policy", "model_provider=streamrl", "model_providers.streamrl.env_key=KEY"]
    options += [f"model_providers.streamrl.{name}={value}" for name, value in provider.items()]
    settings = [part for option in options for part in ("-c", option)]
    # The container is the sandbox: its own needs rights that a container may lack.
    unconfined = "--dangerously-bypass-approvals-and-sandbox"
    command = [binary("codex"), "exec", "--skip-git-repo-check", unconfined, *settings, TASK]
    return Start(command, {"KEY": key})


def opencode(url: str, key: str) -> Start:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {"policy": {"limit": {"context": 200_000, "output": 500}}},
    }
    settings = {
        "provider": {"streamrl": provider},
        "model": "streamrl/policy",
        "autoupdate": False,
        "share": "disabled",
    }
    return Start(
        [binary("opencode"), "run", TASK],
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {"opencode.json": json.dumps(settings)},
    )


def qwen_code(url: str, key: str) -> Start:
    environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
    return Start([binary("qwen"), "--auth-type", "openai", "-y", "-p", TASK], environment)


def ai_sdk(url: str, key: str) -> Start:
    # Node looks for packages from the file's own directory on.
    program = MODULES.parent / "ai_sdk.mjs"
    return Start(["node", str(program), url, key])


ECHO = {"command": "echo hello", "description": "echo hello"}
PROGRAMS: dict[str, Program] = {
    "claude-code": Program("@anthropic-ai/claude-code", claude_code, "Bash", ECHO),
    "codex": Program("@openai/codex", codex, "exec_command", {"cmd": "echo hello"}),
    "opencode": Program("opencode-ai", opencode, "bash", ECHO),
    "qwen-code": Program(
        "@qwen-code/qwen-code", qwen_code, "run_shell_command", {**ECHO, "is_background": False}
    ),
    "ai-sdk": Program("ai", ai_sdk, "add", {"a": 1, "b": 2}),
    "openai": of_sdk("openai", "openai"),
    "anthropic": of_sdk("anthropic", "anthropic"),
    "openai-agents": of_sdk("openai_agents", "openai-agents"),
    "litellm": of_sdk("litellm", "litellm"),
    "langchain": of_sdk("langchain", "langchain-openai"),
    "pydantic-ai": of_sdk("pydantic_ai", "pydantic-ai-slim"),
}


def scripted(program: Program, tool_turn: str = STUB_TOOL_TURN) -> Say:
    """The policy of a loop with a tool: it thinks and calls the tool, and answers once it has the
    result. Requests without the tool ask for something else, such as a title.

    `tool_turn`: how the result of a tool begins in a prompt.
    """

    def say(prompt: str, choice: int) -> str:
        if program.tool not in prompt:
            return TITLE
        if tool_turn in prompt:
            return ANSWER_TEXT
        called = tool_call(program.tool, **program.arguments)
        return f"<think>\n{THOUGHT}\n</think>\n\n{called}"

    return say


def play(name: str, url: str, key: str, directory: Path) -> str:
    """Run a client to its end in a directory of its own. Returns what it printed; raises
    RuntimeError with the end of it if the client fails.
    """
    start = PROGRAMS[name].start(url, key)
    home = directory / "home"
    work = directory / "work"
    for made in (home, work):
        made.mkdir(parents=True, exist_ok=True)
    for file, text in start.files.items():
        (work / file).write_text(text)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_COLOR": "1",
        **start.environment,
    }
    done = subprocess.run(
        start.command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(LIMIT_S),
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stdout[-1_000:]}")
    return done.stdout
