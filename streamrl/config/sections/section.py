"""What all sections of a run file have in common."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict

from streamrl.config.plugins import Group, plugins
from streamrl.system.text import unknown_name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
