"""Hooks of MkDocs: what of the site is made when it is built, from the code and from files outside
docs/.

- README.md is the first page; files outside docs/ that a page links to (SECURITY.md, a
  run file, a source) are pages too.
- `<!-- settings -->` and the like (`MADE`) in a page are replaced by tables of what the code has.
- Each room of the package has a page of its docstrings (mkdocstrings).

In docs/, on GitHub and in an editor, links are those of the repository; here they are turned into
the site's.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # MkDocs loads this file by its path

from mkdocs.structure.files import File, Files  # noqa: E402

from docs.hooks import commands, records, requests, settings  # noqa: E402
from streamrl.run.monitoring import metric_names  # noqa: E402

LINK = re.compile(r"""(\]\(|src="|srcset="|href=")([^)\s"#:]+)(#[^)\s"]*)?(?=[)\s"])""")
FENCE = re.compile(r"\s*(```|~~~)")
_sources: dict[str, str] = {}  # of the pages that no file of docs/ is: file of the repository, page
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".jsonl": "json", ".toml": "toml"}
MADE: dict[str, Callable[[], str]] = {
    "<!-- settings -->": settings.tables,
    "<!-- presets -->": settings.presets,
    "<!-- commands -->": commands.pages,
    "<!-- requests -->": requests.tables,
    "<!-- records -->": records.tables,
    "<!-- metrics -->": metric_names.table,
}


def on_config(config: Any) -> Any:
    """The rooms of the package go into the navigation in place of `api`."""
    replace_in(config.nav, "api", [{title: uri} for title, uri, _ in rooms()])
    return config


def replace_in(nav: Any, placeholder: str, by: list[Any]) -> None:
    for entry in nav:
        for title, inside in entry.items() if isinstance(entry, dict) else ():
            if inside == placeholder:
                entry[title] = by
            elif isinstance(inside, list):
                replace_in(inside, placeholder, by)


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that no file of docs/ is."""
    made = _sources
    made.clear()
    made["README.md"] = place_of("README.md")
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + ["README.md"]
    while todo:
        page = todo.pop()
        for target in outside(page, (ROOT / page).read_text()):
            if target not in made:
                made[target] = place_of(target)
                todo += [target] if target.endswith(".md") else []
    for source, uri in made.items():
        files.append(File.generated(config, uri, content=text_of(source)))
    for title, uri, modules in rooms():
        text = "\n".join(f"::: {module}\n" for module in modules)
        files.append(File.generated(config, uri, content=f"# {title}\n\n{text}"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    source = next((name for name, made in _sources.items() if made == uri), f"docs/{uri}")
    for marker, make in MADE.items():
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return with_links(markdown, lambda link: the_sites(link, source, uri))


def rooms() -> list[tuple[str, str, list[str]]]:
    """Title, page and modules of each room, and before them those of the package itself."""
    package = ROOT / "streamrl"
    found = [("streamrl", "api/streamrl.md", named(package.glob("*.py")))]
    for room in sorted(path.parent for path in package.glob("*/__init__.py")):
        found.append((f"streamrl.{room.name}", f"api/{room.name}.md", named(room.rglob("*.py"))))
    return found


def named(files: Iterable[Path]) -> list[str]:
    """Names of the modules among them; what runs as a plain file, outside the package, is none."""
    modules = sorted(
        file
        for file in files
        if not file.stem.startswith("__") and (file.parent / "__init__.py").exists()
    )
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in modules]


# ---- links ---------------------------------------------------------------------------------------


def place_of(source: str) -> str:
    """Page of the site that shows a file of the repository."""
    if source == "README.md":
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"repository/{source}" if source.endswith(".md") else f"repository/{source}.md"


def outside(page: str, text: str) -> list[str]:
    """Files of the repository, not in docs/, that a page of it links to."""
    found: list[str] = []

    def note(link: str) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if (
            not target.startswith(("docs/", ".."))
            and target != "README.md"
            and (ROOT / target).is_file()
        ):
            found.append(target)
        return link

    with_links(text, note)
    return found


def the_sites(link: str, source: str, uri: str) -> str:
    """A link of file `source` as it is from page `uri`."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target.startswith("..") or not (ROOT / target).is_file():
        return link  # MkDocs reports what is wrong with it
    return posixpath.relpath(place_of(target), posixpath.dirname(uri) or ".")


def with_links(text: str, change: Callable[[str], str]) -> str:
    """The text with its relative links changed, those in blocks of code left alone."""
    lines = text.split("\n")
    inside = ""
    for i, line in enumerate(lines):
        if fence := FENCE.match(line):
            inside = "" if inside == fence[1] else inside or fence[1]
        elif not inside:
            lines[i] = LINK.sub(lambda m: f"{m[1]}{change(m[2])}{m[3] or ''}", line)
    return "\n".join(lines)


def text_of(source: str) -> str:
    """The page of a file: Markdown as it is, others as a block of code."""
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(source).suffix, "text")
    return f"# {source}\n\n````{language}\n{text}````\n"
