"""The settings of a run file as tables, from `streamrl/config/sections/`: name, type and default
from the models, the meaning from the comments.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from streamrl.config.presets import PRESETS
from streamrl.config.run_file import RunFile
from streamrl.config.sections.section import Section, sections_in

SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


class Place(NamedTuple):
    """A section and where it is in a run file, as `envs.<name>.pass_rate`. `choice` has the tags
    that choose it where a setting may be one of several sections.
    """

    path: str
    model: type[Section]
    choice: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()  # settings that a table before has: what all choices have

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """The settings of the section that its table has."""
        fields = self.model.model_fields
        return {name: field for name, field in fields.items() if name not in self.shown}


def tables() -> str:
    """All of them, in Markdown, in the order of the run file."""
    return "\n".join(table(place) for place in places(Place("", RunFile)))


def presets() -> str:
    """What each preset sets, as a table."""
    rows = list[str]()
    for preset, values in PRESETS.items():
        settings = ", ".join(f"`{name}: {shown(value)}`" for name, value in values.items())
        rows.append(f"| `{preset}` | {settings} |")
    return "\n".join(["| preset | settings |", "|---|---|", *rows])


def places(place: Place) -> Iterator[Place]:
    """This section and, after it, those inside it."""
    yield place
    for name, field in place.fields.items():
        path = f"{place.path}.{name}{suffix_of(field.annotation)}".lstrip(".")
        chosen: dict[type[Section], list[str]] = {}
        for tag, inner in sections_in(field.annotation).items():
            chosen.setdefault(inner, []).append(tag)
        common = common_section([*chosen])
        shown: tuple[str, ...] = ()
        if common:
            shown = tuple(common.model_fields)
            yield from places(Place(path, common))
        for inner, tags in chosen.items():
            yield from places(Place(path, inner, tuple(tag for tag in tags if tag), shown))


def common_section(sections: list[type[Section]]) -> type[Section] | None:
    """The section with the settings that all of these have, where one is the base of them all."""
    bases = {section.__base__ for section in sections}
    if len(sections) < 2 or len(bases) > 1:
        return None
    (base,) = bases
    return base if base and base is not Section and issubclass(base, Section) else None


def suffix_of(annotation: Any) -> str:
    """What follows the name of a setting that holds sections by name or by place."""
    return {dict: ".<name>", list: "[]"}.get(get_origin(annotation), "")


def table(place: Place) -> str:
    rows = [
        f"| `{name}` | {type_of(field)} | {default_of(field)} |"
        f" {escaped(meaning(place.model, name, field))} |"
        for name, field in place.fields.items()
    ]
    title = f"`{place.path}`" if place.path else "The run file"
    if place.choice:
        title += f" ({', '.join(f'`{tag}`' for tag in place.choice)})"
    about = escaped(inspect.cleandoc(place.model.__doc__ or ""))
    return "\n".join(
        [
            f"## {title}",
            "",
            about,
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def meaning(model: type[Section], name: str, field: FieldInfo) -> str:
    """The meaning of a setting: the comment next to it, otherwise the docstring of the section."""
    inner = next(iter(sections_in(field.annotation).values()), None)
    return comments(model).get(name) or (
        first_sentence(inner.__doc__) if inner and inner.__doc__ else ""
    )


@functools.cache
def comments(model: type) -> dict[str, str]:
    """The comment of each field of a class: the lines of comment above it, or the one after it."""
    lines = inspect.getsourcelines(model)[0]
    found: dict[str, str] = {}
    base = model.__base__
    if base is not None and base is not Section and issubclass(base, Section):
        found |= comments(base)
    for node in ast.walk(ast.parse("".join(lines))):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.end_lineno is not None
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        above = list[str]()
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            above.insert(0, line)
        texts = [line.strip().removeprefix("#").strip() for line in [*above, after]]
        found[node.target.id] = " ".join(text for text in texts if text)
    return found


def type_of(field: FieldInfo) -> str:
    """In words: `int ≥ 1`, `block` or `spill`, a map."""
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for kind, name, sign in SIGNS
        if isinstance(limit, kind)
    ]
    return " ".join([named(field.annotation), ", ".join(limits)]).strip()


def named(annotation: Any) -> str:
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice or '(empty)'}`" for choice in inside)
    if origin in (Union, types.UnionType):
        names = ["nothing" if choice is type(None) else named(choice) for choice in inside]
        return " or ".join(dict.fromkeys(names))
    if origin is dict:
        return f"map of {named(inside[1])}"
    if origin is list:
        return f"list of {named(inside[0])}"
    if origin is not None:  # Annotated
        return named(inside[0])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return "anything" if annotation is Any else annotation.__name__


def default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Section) or value is None or value in ("", [], {}):
        return ""
    return f"`{shown(value)}`"


def shown(value: Any) -> str:
    """As a run file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0].removesuffix(".")


def escaped(text: str) -> str:
    """For a cell of a table: `|` and `<` would end or open something. Pages that are named become
    links.
    """
    return re.sub(
        r"docs/([a-z-]+)\.md", r"[\1](\1.md)", text.replace("|", "\\|").replace("<", "&lt;")
    )


def without_meaning() -> list[str]:
    """The settings without a meaning: with no comment and with no docstring of a section."""
    return [
        f"{place.path}.{name}".lstrip(".")
        for place in places(Place("", RunFile))
        for name, field in place.model.model_fields.items()
        if not meaning(place.model, name, field)
    ]
