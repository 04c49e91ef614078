"""The lines of docs/train-your-agent.md for Claude Code and Codex are those that `make clients`
starts.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.clients.programs import PROGRAMS, ROOT, TASK, Start

PAGE = ROOT / "docs" / "train-your-agent.md"
URL = "http://127.0.0.1:8700"
DOCUMENTED_TASK = "fix the test"
# Words by which a line on a page differs from one in a container, which is the sandbox.
SANDBOX = {"--sandbox", "workspace-write"}
NO_SANDBOX = {"--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"}


def documented(beginning: str) -> list[str]:
    """The words of the command of the page that begins so."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if line.startswith(beginning))
    return [word for word in shlex.split(line) if word not in SANDBOX]


def words(start: Start) -> list[str]:
    """The words of a start, as the page would have them."""
    program = Path(start.command[0]).name
    kept = [word for word in start.command[1:] if word not in NO_SANDBOX]
    return [program, *(DOCUMENTED_TASK if word == TASK else word for word in kept)]


def test_the_line_for_claude_code_is_the_one_that_runs():
    start = PROGRAMS["claude-code"].start(URL, "$KEY")
    line = documented("ANTHROPIC_BASE_URL=")
    given = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
    assert line[:2] == [f"{name}={start.environment[name]}" for name in given]
    assert line[2:] == words(start)


def test_the_line_for_codex_is_the_one_that_runs():
    start = PROGRAMS["codex"].start(URL, "$KEY")
    line = documented("codex exec")
    assert start.environment == {"KEY": "$KEY"}
    assert line[:2] == words(start)[:2] == ["codex", "exec"]
    assert sorted(line[2:]) == sorted(words(start)[2:])
