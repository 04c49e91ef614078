"""A scorer as bad as can be, in a module that takes no time to import."""

from __future__ import annotations

from typing import Any


def executed(text: str) -> Any:
    """It runs what it is told."""
    found: dict[str, Any] = {}
    exec(text, found)
    return found.get("found")
