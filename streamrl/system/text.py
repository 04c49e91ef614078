"""Text for people: on one line, safe for a terminal, and what an unknown name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of `names`; empty if none has a similarity of `cutoff`, between 0 and 1."""
    return next(iter(difflib.get_close_matches(name, list(names), 1, cutoff)), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question that offers the nearest of `names`; empty if none is near."""
    near = nearest(name, names)
    return f"did you mean {near!r}?" if near else ""


def nearest_or_all(name: str, names: Collection[str]) -> str:
    """What to choose instead of an unknown name: the nearest known one, or all of them."""
    return did_you_mean(name, names) or f"there are {', '.join(names)}"


def unknown_name(name: str, shipped: Iterable[str]) -> str:
    """The error text for an unknown name where a shipped one or MODULE:NAME is allowed."""
    names = [shipped_name for shipped_name in shipped if shipped_name]
    hint = did_you_mean(name, names) or f"shipped: {', '.join(names)}; your own: MODULE:NAME"
    return f"{name!r} is not known; {hint}"


def one_line(text: object, limit: int = 300) -> str:
    """The text of an error, or any other, on one line of at most `limit` characters."""
    return " ".join(str(text).split())[:limit]


def escaped(text: str, keep: str = "\n\t") -> str:
    """The text with whatever would do something to a terminal written out: control characters, but
    for those in `keep`.
    """
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode()
        for character in text
    )


def printable(text: str, limit: int = 300) -> str:
    """One line of bounded length that does nothing to a terminal, whatever a sender has put into
    it.
    """
    ellipsis = "..." if len(text) > limit else ""
    return escaped(text[:limit], keep="") + ellipsis
