"""What the policy of the tests says: a function of the question and of how often it was asked."""

from __future__ import annotations

import zlib


def said(question: str, turn: int) -> str:
    """A sum of two digits, right in about one case of nine."""
    return str(zlib.crc32(f"{question} {turn}".encode()) % 19)


def from_prompt(prompt: str, choice: int) -> str:
    """The same of a prompt, as the stub of vLLM renders it."""
    first = prompt.split("<user>")[1].partition("<end>")[0]
    return said(first, prompt.count("<user>"))
