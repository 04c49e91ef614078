"""Words that make prose slow to read are rare, as they are in other code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = re.compile(
    r"\b(says|said|nobody|whoever|somebody|lies|lay|stands|stood|behind|beside|goes on|went on"
    r"|passed over|put aside|of its own)\b",
    re.IGNORECASE,
)
KINDS = {".py", ".md", ".yaml", ".js", ".html", ".css"}


@pytest.mark.parametrize(
    "place",
    ["streamrl", "docs", "README.md", "AGENTS.md", "SECURITY.md", "examples", "deploy", "topics"],
)
def test_a_thousand_lines_have_one_such_word_at_most(place: str):
    """It is `continues`, `after`, `next to`, `skipped`, `states`."""
    root = ROOT / place
    files = [path for path in [root, *root.rglob("*")] if path.suffix in KINDS and path.is_file()]
    found = list[str]()
    lines = 0
    for path in sorted(files):
        text = path.read_text()
        lines += text.count("\n")
        for number, line in enumerate(text.splitlines(), start=1):
            found += [f"{path.relative_to(ROOT)}:{number}: {word}" for word in WORDS.findall(line)]
    assert len(found) <= max(lines / 1000, 1), found
