"""The blocks of code in README.md, SECURITY.md and docs/, and what is done with one: commands and
Python are run, data is checked.

A comment before a block says what is not to be seen:

    <!-- needs: live run -->    it is not run here but counted (`TAGS` says what the words mean)
    <!-- file: greet.py -->     it is saved under that name, where the page's other blocks run
    <!-- exit: 1 -->            its exit code

"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import click
import duckdb
import yaml
from click.testing import CliRunner
from markdown_it import MarkdownIt

from streamrl.cli.command import cli
from streamrl.config import run_file
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")))
]
TAGS = {
    "live run": (
        "parts that go on until somebody stops them, a vLLM among them; README's are run by"
        " tests/docs/test_live.py"
    ),
    "learner": "a run that a learner has trained, and JAX: run by tests/docs/test_live.py",
    "torch": "PyTorch beside them, which only the environment of vLLM has: run there too",
    "cluster": "several machines, or a Kafka that asks for passwords",
    "minutes": "a whole test or bench of its own",
    "gpu": "NVIDIA's GPUs, and packages and models from the internet",
}
SAYS = re.compile(r"<!--\s*(needs|file|exit):\s*(.+?)\s*-->")
LIMIT_S = patience(120.0)


class Block(NamedTuple):
    page: str
    line: int
    language: str  # empty: an indented one
    text: str
    needs: str = ""
    file: str = ""
    exit: int = 0

    @property
    def runs(self) -> bool:
        """Is it to be run here? `text` is output, or a picture."""
        return not self.needs and self.language != "text"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """All blocks of code of a page, in order."""
    found = list[Block]()
    said = dict[str, str]()
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        if token.type == "html_block":
            said = dict(SAYS.findall(token.content))
        elif token.type in ("fence", "code_block"):
            language = token.info.split()[0] if token.info else ""
            line = token.map[0] + 1 if token.map else 0
            found.append(
                Block(
                    page=page,
                    line=line,
                    language=language,
                    text=token.content,
                    needs=said.get("needs", ""),
                    file=said.get("file", ""),
                    exit=int(said.get("exit", 0)),
                )
            )
            said = {}
        elif token.nesting >= 0:
            said = {}
    return found


def mentions(page: str) -> list[list[str]]:
    """Commands of streamrl and make that the text or a tagged block of a page names, in words."""
    found = [
        command.words
        for block in blocks(page)
        if block.language == "sh" and block.needs
        for command in commands(block)
    ]
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        spans = [child.content for child in token.children or [] if child.type == "code_inline"]
        found += [span.split() for span in spans if span.startswith(("streamrl ", "make "))]
    return [words for words in found if words[0] in ("streamrl", "make")]


def objection(words: list[str]) -> str:
    """What there is not of a command that is not run: a command, an option, a target of make.
    Empty: it is all there.
    """
    if words[0] == "make":
        return "" if words[1] in targets() else f"no target {words[1]}"
    command: click.Command = cli
    for word in words[1:]:
        if isinstance(command, click.Group) and not word.startswith("-"):
            if word not in command.commands:
                return "" if word.isupper() else f"no command {word}"
            command = command.commands[word]
        elif word.startswith("--") and word != "--help":
            options = [
                option for parameter in (*command.params, *cli.params) for option in parameter.opts
            ]
            if word.partition("=")[0] not in (*options, "--version"):
                return f"no option {word}"
    return ""


@functools.cache
def targets() -> set[str]:
    """The targets of the Makefile that are no files."""
    listed = subprocess.run(
        ["make", "--print-data-base", "--question", ":"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return set(re.findall(r"^([a-z-]+):", listed.stdout, re.MULTILINE))


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


# ---- running them --------------------------------------------------------------------------------


def run(block: Block, directory: Path) -> None:
    """Run or check it in `directory`, where it may find what earlier blocks have left. Raises
    AssertionError.
    """
    if block.file:
        (directory / block.file).write_text(block.text)
    RUNNERS[block.language](block, directory)


def shell(block: Block, directory: Path) -> None:
    for command in commands(block):
        if command.words[0] == "streamrl" and not command.environment:
            code, said = streamrl(command.words[1:])
        else:
            environment = {**os.environ, **command.environment}
            done = subprocess.run(
                command.words,
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            code = done.returncode
            said = done.stdout + done.stderr
        assert code == block.exit, f"{block}: {shlex.join(command.words)}: exit code {code}: {said}"
        if command.file:
            (directory / command.file).write_text(said)


class Command(NamedTuple):
    words: list[str]
    environment: dict[str, str]  # what is set before it
    file: str = ""  # behind `>`: its output goes there


def commands(block: Block) -> list[Command]:
    """Those of a block; a comment is none, and a line may go on behind a backslash."""
    found: list[Command] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        environment = dict[str, str]()
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        file = words[-1] if ">" in words[-2:] else ""
        if words:
            found.append(Command(words[:-2] if file else words, environment, file))
    return found


def streamrl(arguments: list[str]) -> tuple[int, str]:
    """In this process, whose directory is the block's: a process for each command would cost more
    than most of them do.
    """
    done = CliRunner().invoke(cli, arguments, prog_name="streamrl")
    return done.exit_code, done.output


def python(block: Block, directory: Path) -> None:
    """In a process: nothing of it is left for the next one."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}
    done = subprocess.run(
        [sys.executable, "-c", block.text],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == block.exit, (
        f"{block}: exit code {done.returncode}: {done.stdout}{done.stderr}"
    )


def settings(block: Block, directory: Path) -> None:
    """A run file or a part of one; of other programs' files (Kubernetes, compose) only that they
    are YAML: they have tests of their own.
    """
    for data in yaml.safe_load_all(block.text):
        assert isinstance(data, dict), f"{block}: a map of settings is wanted"
        if not {"apiVersion", "services"} & data.keys():
            run_file.parse({"run": "page", "envs": {"copy-digits": {}}, **data}, str(block))


def data(block: Block, directory: Path) -> None:
    """One JSON value, or one a line."""
    try:
        json.loads(block.text)
    except ValueError:
        assert [json.loads(line) for line in block.text.splitlines() if line.strip()], (
            f"{block}: nothing in it"
        )


def package(block: Block, directory: Path) -> None:
    """A part of a pyproject.toml."""
    assert tomllib.loads(block.text), f"{block}: nothing in it"


def query(block: Block, directory: Path) -> None:
    found = duckdb.sql(block.text)
    assert found and found.fetchall(), f"{block}: no rows"


RUNNERS: dict[str, Any] = {
    "sh": shell,
    "python": python,
    "yaml": settings,
    "json": data,
    "toml": package,
    "sql": query,
}
