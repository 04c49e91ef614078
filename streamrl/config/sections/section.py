"""What all sections of a run file have in common."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict

from streamrl.text import unknown_name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def one_of(*shipped: str) -> AfterValidator:
    """Accepts a shipped name, or MODULE:NAME, which is imported where it is used."""

    def check(name: str) -> str:
        if name in shipped or ":" in name:
            return name
        raise ValueError(unknown_name(name, shipped))

    return AfterValidator(check)
