"""What becomes of each field of a request, as tables, from the gateway's `fields.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from streamrl.extensions.gateway.fields import FIELDS, Rule

HEAD = "| field | what becomes of it |\n|---|---|"


def tables() -> str:
    """A table for each API."""
    return "\n".join(
        f"## {path}\n\n{HEAD}\n" + "\n".join(rows(fields)) + "\n" for path, fields in FIELDS.items()
    )


def rows(fields: Mapping[str, Rule], path: str = "") -> Iterator[str]:
    """The rows of these fields and of those inside them. Fields with the same rule share one."""
    shared = dict[str, list[str]]()
    for name, rule in fields.items():
        shared.setdefault(meaning(rule), []).append(f"`{path}{name}`")
    for text, names in sorted(shared.items()):
        yield f"| {', '.join(names)} | {text} |"
    for name, rule in fields.items():
        yield from rows(rule.fields or {}, f"{path}{name}.")
        for kind, inner in (rule.kinds or {}).items():
            if kind and inner.fields:
                yield from rows(inner.fields, f"{path}{name}[{kind}].")
        kinds = {f"[{kind}]": inner for kind, inner in (rule.kinds or {}).items() if kind}
        if kinds:
            yield from rows(
                {kind: inner._replace(fields=None) for kind, inner in kinds.items()},
                f"{path}{name}",
            )


def meaning(rule: Rule) -> str:
    """The outcome of a field and its reason, and the values that are taken all the same."""
    text = f"{rule.outcome}: {rule.reason}" if rule.reason else rule.outcome
    if rule.neutral:
        text += f" (but {', '.join(f'`{json.dumps(value)}`' for value in rule.neutral)} is taken)"
    return text.replace("|", "\\|")
