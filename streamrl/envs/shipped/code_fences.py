"""Finds the program in a text: its fenced blocks, read line by line as CommonMark does."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import NamedTuple

# A list's bullet or a quote's mark may come before a fence; a model may write a sentence before it.
OPENING = re.compile(r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
PREFIX = re.compile(r"[\s>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?")
CLOSING = re.compile(r"(?P<indent>[\s>]*)(?P<fence>`{3,}|~{3,})\s*")
LONGEST_FENCE = 500  # characters of a line; a longer one is no fence
PYTHON = re.compile(
    r"(?:language-|lang-)?(?:i?python|py)[0-9.]*(?:[-_](?:code|repl))?|[\w./-]+\.py|sage|tool_code"
)
NO_LANGUAGE = ("", "code", "none", "plain", "plaintext", "solution", "text", "txt")
IN_LINE = re.compile(r"\s*```(?:python[ \t])?([^`\n]+)```\s*")  # a program of one line
MARKDOWN = ("markdown", "md")
# What a block defines at its top level: a function, a class, or a lambda with a name.
DEFINITION = re.compile(
    r"(?m)^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=[ \t]*lambda\b"
)
# The lines of a block that only imports and sets constants: it calls nothing.
SETUP_LINE = re.compile(r"(?:import|from)[ \t].*|\w+[ \t]*(?::[^=(]*)?=[^(]*|[#\s)\]}].*|")


class Block(NamedTuple):
    """A fenced block."""

    tag: str  # the first word after the fence, in lower case; empty if there is none
    text: str


def program_in(text: str) -> str:
    """The program of a text: all of the text if it has no fenced block, otherwise the blocks of
    Python.

    Blocks that define something belong to it, unless a later one defines the same again, and so do
    blocks of imports and constants before them. A block that uses what others define, or shows what
    they print, does not. If none defines anything, it is the last block. A text whose blocks are
    all of other languages has an empty program.
    """
    blocks = fenced_blocks(text)
    if not blocks:
        in_line = IN_LINE.fullmatch(text)
        return in_line[1] if in_line else text
    python = [block.text for block in blocks if PYTHON.fullmatch(block.tag)]
    untagged = [block.text for block in blocks if not block.tag]
    others = ("",) if python else NO_LANGUAGE
    code = [
        block.text
        for block in blocks
        if PYTHON.fullmatch(block.tag) or (block.tag in others and _defined(block.text))
    ]
    if any(map(_defined, code)):
        return _joined(code)
    return (python or untagged or [""])[-1]


def fenced_blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, in order. One that is left open ends with the text. A block of
    Markdown is replaced by those that it has.
    """
    return [
        inner
        for block in _blocks(text)
        for inner in (_blocks(block.text) if block.tag in MARKDOWN else [block])
    ]


def _blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    fence = ""
    tag = ""
    indent = 0
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n"):
        if not fence:
            opening = _opening(line)
            if opening:
                fence, tag, indent = opening
                lines = []
        elif _closes(line, fence, indent):
            blocks.append(_block(tag, lines))
            fence = ""
        else:
            lines.append(_without_indent(line, indent))
    if fence:
        if lines and not lines[-1].lstrip().startswith(("#", "`")):
            lines[-1] = lines[-1].rstrip().removesuffix(fence)
        blocks.append(_block(tag, lines))
    return blocks


def _block(tag: str, lines: list[str]) -> Block:
    """A block of these lines, without what is before all of them: the blanks before the first fence
    of an answer are lost where the answer is read.
    """
    text = "\n".join(lines) + "\n"
    return Block(tag, dedent(text) if PYTHON.fullmatch(tag) else text)


def _opening(line: str) -> tuple[str, str, int] | None:
    """The fence, the tag and the indent of a block that begins in this line."""
    match = OPENING.fullmatch(line) if len(line) <= LONGEST_FENCE else None
    if not match:
        return None
    words = match["info"].strip().strip("{}[]").split()
    before = match["before"]
    prefix = PREFIX.match(before)
    if not (prefix and prefix.end() == len(before)):
        # A sentence before the fence: only what can be nothing else is one.
        if len(words) != 1 or not PYTHON.fullmatch(words[0].lower()) or match["fence"][0] == "~":
            return None
        return match["fence"], "python", 0
    tag = re.split(r"[:,{]", words[0].lstrip("."))[0].lower() if words else ""
    return match["fence"], tag, len(before)


def _closes(line: str, fence: str, indent: int) -> bool:
    match = CLOSING.fullmatch(line) if len(line) <= LONGEST_FENCE else None
    if not match or match["fence"][0] != fence[0] or len(match["fence"]) < len(fence):
        return False
    return len(match["indent"]) < indent + 4


def _without_indent(line: str, indent: int) -> str:
    """The line without as much of its indent, or of the marks of a quote, as its fence has."""
    prefix = re.match(r"[\s>]*", line[:indent])
    return line[prefix.end() if prefix else 0 :]


def _defined(block: str) -> set[str]:
    """The names that a block defines."""
    return {match[1] or match[2] for match in DEFINITION.finditer(block)}


def _is_setup(block: str) -> bool:
    """Whether a block only imports and sets constants."""
    return all(map(SETUP_LINE.fullmatch, block.split("\n")))


def _joined(blocks: list[str]) -> str:
    """The blocks that define something, but for those that a later one defines again, with blocks
    of imports and constants before them.
    """
    kept: list[str] = []
    later: set[str] = set()
    for block in reversed(blocks):
        names = _defined(block)
        if (names and not names & later) or (not names and kept and _is_setup(block)):
            kept.append(block)
            later |= names
    return "\n".join(reversed(kept))
