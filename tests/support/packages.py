"""Packages that a test installs: directories with the metadata that pip would write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    package: str,
    code: str = "",
    **groups: Mapping[str, str],
) -> None:
    """Put a package with a module of its name on Python's path. `groups` has the entry points of
    each group, whose name is given without `streamrl.`.
    """
    module = package.replace("-", "_")
    metadata = directory / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines: list[str] = []
    for group, entries in groups.items():
        lines.append(f"[streamrl.{group}]")
        lines += [f"{name} = {path}" for name, path in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (directory / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(directory)
