"""Files and functions that the pages name are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "AGENTS.md",
    "README.md",
    "SECURITY.md",
    *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
# These pages name files of other projects.
FOREIGN = {"docs/comparison.md"}
# The reader writes these files himself.
WRITTEN = {"brief.py", "larger_digit.py", "my_loss.py"}
NAMED = re.compile(r"(?<![\w/.<*{-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")


def tails() -> set[str]:
    """Every file of the project by every end of its path: `a/b/c.py`, `b/c.py`, `c.py`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = set[str]()
    for name in listed.stdout.split():
        parts = PurePosixPath(name).parts
        found.update("/".join(parts[i:]) for i in range(len(parts)))
    return found


def missing(text: str, there: set[str]) -> set[str]:
    return {name for name in NAMED.findall(text) if name not in there} - WRITTEN


@pytest.mark.parametrize("page", sorted(set(PAGES) - FOREIGN))
def test_files_that_a_page_names_are_there(page: str):
    assert missing((ROOT / page).read_text(), tails()) == set()


FUNCTION = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py):(\w+)`")


@pytest.mark.parametrize("page", sorted(set(PAGES) - FOREIGN))
def test_functions_that_a_page_names_are_there(page: str):
    for file, name in FUNCTION.findall((ROOT / page).read_text()):
        path = ROOT / file if (ROOT / file).exists() else ROOT / "streamrl" / file
        assert re.search(rf"(def|class) {name}\b", path.read_text()), f"{page}: {file}:{name}"


def test_a_file_that_is_not_there_is_found():
    assert missing("see `nowhere/at_all.py` and `buffer/staleness.py`", tails()) == {
        "nowhere/at_all.py"
    }
