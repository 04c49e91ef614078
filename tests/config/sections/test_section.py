from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import ValidationError

from streamrl.config.sections.section import Section, one_of


class Choice(Section):
    name: Annotated[str, one_of("this", "that")] = "this"


def test_a_shipped_name_or_ones_own_is_accepted():
    assert Choice(name="that").name == "that"
    assert Choice(name="nowhere:mine").name == "nowhere:mine"
    with pytest.raises(ValidationError, match="'thta' is not known; did you mean 'that'"):
        Choice(name="thta")


def test_a_section_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Choice().name = "that"  # type: ignore[misc]
