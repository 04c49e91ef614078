"""The site is built strictly from the pages and the code, needs nothing from elsewhere, and leaves
nothing out; the pages are whole without it.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

import click
import numpy as np
import pytest
from markdown_it import MarkdownIt
from pydantic import Field

from docs.hooks import commands, records, settings, site
from streamrl.cli.command import cli
from streamrl.config.run_file import RunFile
from streamrl.config.sections.section import Section
from streamrl.run.monitoring.metric_names import METRICS
from streamrl.stream.records import RECORDS, Column, Probe
from tests.docs.blocks import PAGES, ROOT
from tests.support.waiting import patience

# what a browser would load
FETCHED = re.compile(
    r"""<(script|img|iframe|source|link)\b[^>]*?\b(?:src|srcset|href)=["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(directory),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return directory


def test_nothing_is_fetched_from_elsewhere(built: Path):
    pages = list(built.rglob("*.html"))
    assert len(pages) > 40
    assert [
        str(page.relative_to(built)) for page in pages if FETCHED.search(page.read_text())
    ] == []
    assert [
        str(style)
        for style in built.rglob("*.css")
        if re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text())
    ] == []


def test_every_record_and_metric_is_there(built: Path):
    shown = (built / "records.html").read_text()
    for name, record in RECORDS.items():
        _, heading, after = shown.partition(f'<h3 id="{name}">')
        section = after.partition("<h3")[0]
        assert heading, name
        assert [f for f in record.__struct_fields__ if f"<code>{f}</code>" not in section] == []
    shown = (built / "metrics.html").read_text()
    assert [m.name for m in METRICS if f"<code>{m.name}</code>" not in shown] == []


def test_every_setting_command_and_module_is_there(built: Path):
    shown = (built / "settings.html").read_text()
    assert all(
        f"<code>{name}</code>" in shown
        for place in settings.places(settings.Place("", RunFile))
        for name in place.model.model_fields
    )
    shown = (built / "commands.html").read_text()
    assert [
        path for path, _ in commands.commands((), cli) if f'id="{"-".join(path)}"' not in shown
    ] == []
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "streamrl").rglob("*.py")
        if not path.stem.startswith("__")
    ]
    shown = "".join(page.read_text() for page in (built / "api").glob("*.html"))
    # They run in vLLM's environment, and in an env's own.
    elsewhere = ("streamrl.inference.servers.inside_vllm.", "streamrl.envs.servers.inside.")
    assert [
        name for name in modules if f'id="{name}"' not in shown and not name.startswith(elsewhere)
    ] == []


def test_the_readme_is_the_first_page_and_its_links_are_the_sites(built: Path):
    first = (built / "index.html").read_text()
    assert (
        "See it learn" in first
        and 'href="tutorial.html"' in first
        and 'href="repository/SECURITY.html"' in first
    )
    assert (
        'src="images/loop.svg"' in first and re.findall(r'(?:href|src)="(docs/[^"]*)"', first) == []
    )


# ---- what is made of the code --------------------------------------------------------------------


class Inner(Section):
    """One of several. Said at length."""

    size_tokens: int = Field(default=3, ge=1, lt=9)  # of a <row> | or less (docs/data.md)


class Outer(Section):
    name: str
    # What is said above a setting
    # is its meaning as well.
    flag: bool = False
    many: dict[str, Inner] = Field(default={})
    one: Inner | None = None  # or not


def test_a_table_by_hand():
    first, second, third = (
        settings.table(place) for place in settings.places(settings.Place("", Outer))
    )
    rows = [line for line in first.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `name` | str | required |  |",
        "| `flag` | bool | `false` | What is said above a setting is its meaning as well. |",
        "| `many` | map of section |  | One of several |",
        "| `one` | section or nothing |  | or not |",
    ]
    assert "## `many.<name>`" in second and "## `one`" in third
    assert (
        second.splitlines()[-1]
        == "| `size_tokens` | int ≥ 1, < 9 | `3` | of a &lt;row> \\| or less ([data](data.md)) |"
    )


def test_the_table_of_a_record_by_hand():
    shown = records.section("probe", Probe).splitlines()
    assert shown[0] == "### probe" and shown[2].startswith("A short text")
    assert shown[-2:] == [
        "| `tokens` | array | required | (n,) unsigned |",
        "| `logprobs` | array | required | (n - 1,) float32: of tokens[1:], each given those before"
        " it |",
    ]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (list[Probe], "list of Probe"),
        (dict[str, float], "map of float"),
        (int | None, "int"),
        (Annotated[np.ndarray, Column("token", "<f4")], "`<f4` by token"),
        (Literal["a", "b"], "`a`, `b`"),
    ],
)
def test_the_type_of_a_field_in_words(hint: object, words: str):
    assert records.type_of(hint) == words


def test_every_setting_has_a_meaning():
    assert settings.without_meaning() == []


def test_a_command_is_shown_as_its_help_says():
    @click.command()
    @click.argument("run")
    @click.option("--deep", help="Twice.")
    def look(run: str, deep: str) -> None:
        """Look at it."""

    shown = commands.page(("see", "look"), look)
    assert (
        shown.startswith("## see look\n")
        and "Usage: streamrl see look [OPTIONS] RUN" in shown
        and "--deep TEXT" in shown
    )


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "source", "page", "expected"),
    [
        ("docs/data.md", "README.md", "index.md", "data.md"),
        ("docs/images/loop.svg", "README.md", "index.md", "images/loop.svg"),
        ("SECURITY.md", "README.md", "index.md", "repository/SECURITY.md"),
        ("../README.md", "docs/tutorial.md", "tutorial.md", "index.md"),
        (
            "../streamrl/config/run_file.py",
            "docs/settings.md",
            "settings.md",
            "repository/streamrl/config/run_file.py.md",
        ),
        ("docs/data.md", "SECURITY.md", "repository/SECURITY.md", "../data.md"),
        ("nowhere.md", "docs/data.md", "data.md", "nowhere.md"),
    ],
)
def test_links_of_the_repository_become_the_sites(link: str, source: str, page: str, expected: str):
    assert site.the_sites(link, source, page) == expected


def test_links_are_found_outside_code_only():
    text = (
        '[a](x.md#b) ![c](y.png) <img src="z.svg"> [d](https://e/f)'
        " [g](#h)\n```sh\n[i](j.md)\n```\n[k](l.md)"
    )
    seen: list[str] = []
    changed = site.with_links(text, lambda link: seen.append(link) or link.upper())
    assert seen == ["x.md", "y.png", "z.svg", "l.md"]
    assert (
        changed.startswith('[a](X.MD#b) ![c](Y.PNG) <img src="Z.SVG">') and "[i](j.md)" in changed
    )


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text())
    titles = [
        tokens[i + 1].children or []
        for i, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    found: set[str] = set()
    for children in titles:
        text = unicodedata.normalize("NFC", "".join(child.content for child in children)).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, "AGENTS.md", "CHANGELOG.md"])
def test_links_lead_somewhere_in_the_repository_too(page: str):
    wrong: list[str] = []
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        for child in token.children or []:
            target = unquote(str(child.attrs.get("href") or child.attrs.get("src") or ""))
            if not target or re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            )
            if not (ROOT / there).exists() or (
                anchor and there.endswith(".md") and anchor not in anchors(there)
            ):
                wrong.append(target)
    assert wrong == []


# a path, and perhaps names that it has
NAMED = re.compile(r"`((?:streamrl|tests|deploy|docs)/[^`<>*\s]+)`(?: \(((?:`\w+`(?:, )?)+)\))?")


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/design/")])
def test_files_and_names_that_a_design_points_to_are_there(page: str):
    named = NAMED.findall((ROOT / page).read_text())
    assert named
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    wanted = [(path, name) for path, names in named for name in re.findall(r"\w+", names)]
    assert [
        (path, name)
        for path, name in wanted
        if not re.search(rf"\b(def|class) {name}\b", (ROOT / path).read_text())
    ] == []


def test_no_reference_leads_nowhere():
    """The code points to docs/design/ by path, and each path is a page."""
    found = re.compile(r"docs/design/[\w/.-]+\.md")
    sources = [path for room in ("streamrl", "tests") for path in (ROOT / room).rglob("*.py")]
    pointed = {name for path in sources for name in found.findall(path.read_text())}
    assert pointed >= {"docs/design/logprobs.md", "docs/design/grpo.md"}
    assert sorted(name for name in pointed if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize(
    "picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.name
)
def test_pictures_are_ours_whole_and_for_light_and_dark(picture: Path):
    root = ElementTree.fromstring(picture.read_text())
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert (
        names[0] == "svg"
        and "title" in names
        and "desc" in names
        and "image" not in names
        and "script" not in names
    )
    assert "prefers-color-scheme: dark" in picture.read_text() and "viewBox" in root.attrib
