"""A run file to begin with, and the files that belong to it: `streamrl new`."""

from __future__ import annotations

import re
from pathlib import Path

from streamrl.config.choices import NAME
from streamrl.system.errors import ConfigError
from streamrl.system.files import shipped_directory

RUN = "run"  # stem of a template's run file
PLACEHOLDER = "{name}"
RUN_NAME = re.compile(r"^run: .*$", re.MULTILINE)


def templates() -> Path:
    """The directory of all templates, each a directory with a run file. What `deploy/runs/` or
    `examples/` has too is a link to it.
    """
    return shipped_directory("run_templates", "deploy/templates")


def names() -> list[str]:
    """The names of all templates."""
    return sorted(path.parent.name for path in templates().glob(f"*/{RUN}.yaml"))


def write(template: str, name: str, directory: Path) -> list[Path]:
    """Write the files of a template for a run of this name, and return their paths, the run file
    first.

    Raises ConfigError for a name that a run cannot have, and for a file that exists already. Then
    nothing is written.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name of lowercase letters, digits and '-'")
    sources = sorted((templates() / template).iterdir(), key=lambda path: path.stem != RUN)
    texts: dict[Path, str] = {}
    for source in sources:
        if not source.is_file():
            continue
        text = source.read_text()
        if source.stem == RUN:
            path = directory / f"{name}{source.suffix}"
            text = RUN_NAME.sub(f"run: {PLACEHOLDER}", text, count=1)
        else:
            path = directory / f"{name}_{source.name}"
        texts[path] = text
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path} exists; choose another name, or move the file away")
    for path, text in texts.items():
        path.write_text(text.replace(PLACEHOLDER, name))
    return list(texts)
