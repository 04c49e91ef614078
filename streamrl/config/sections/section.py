"""What all sections of a run file have in common."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.fields import FieldInfo

from streamrl.config.plugins import Group, plugins
from streamrl.system.text import unknown_name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def by_key(otherwise: str, **tags: str) -> Discriminator:
    """Chooses among the sections that a setting may be, by a key that only one of them has.

    `tags`: key -> tag of the section that has it, in the order in which the keys are looked for.
    `otherwise`: the tag of the section without any of them.
    """

    def tag(value: Any) -> str:
        keys = type(value).model_fields if isinstance(value, Section) else value
        if not isinstance(keys, dict):
            return otherwise  # That section tells that the value is none.
        return next((name for key, name in tags.items() if key in keys), otherwise)

    return Discriminator(tag)


def sections_in(annotation: Any) -> dict[str, type[Section]]:
    """The sections that a setting may be, or may hold by name or by place, by the tags that choose
    among them. The tag is "" where there is one section.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return {"": annotation}
    inside = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _tagged(inside[0], inside[1:])
    if get_origin(annotation) is dict:
        return sections_in(inside[1])
    found: dict[str, type[Section]] = {}
    for part in inside:
        found |= sections_in(part)
    return found


def _tagged(annotation: Any, metadata: tuple[Any, ...]) -> dict[str, type[Section]]:
    """The sections of an annotation with metadata, which has their tags or the name of the setting
    whose values are the tags.
    """
    for each in metadata:
        if isinstance(each, Tag):
            (section,) = sections_in(annotation).values()
            return {each.tag: section}
        if isinstance(each, FieldInfo) and isinstance(each.discriminator, str):
            members = [list(sections_in(part).values()) for part in get_args(annotation)]
            return {
                tag: section
                for (section,) in members
                for tag in get_args(section.model_fields[each.discriminator].annotation)
            }
    return sections_in(annotation)


def ordered(value: tuple[float, float]) -> tuple[float, float]:
    """Accepts a lowest and a highest value in this order."""
    if value[0] > value[1]:
        raise ValueError(f"{value[0]:g} is the lowest value and is above {value[1]:g}, the highest")
    return value


Finite = Annotated[float, Field(allow_inf_nan=False)]
Limits = Annotated[tuple[Finite, Finite], AfterValidator(ordered)]
"""A lowest and a highest value."""


def one_of(*shipped: str, group: Group | None = None) -> AfterValidator:
    """Accepts a shipped name, one that an installed package adds to the group, or MODULE:NAME. It
    is imported where it is used.
    """

    def check(name: str) -> str:
        if name in shipped or ":" in name:
            return name
        added = plugins(group) if group else {}
        if name in added:
            return name
        raise ValueError(unknown_name(name, (*shipped, *added)))

    return AfterValidator(check)
