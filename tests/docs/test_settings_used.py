"""Every setting is varied by a run file, an example or a test. Others would be constants."""

from __future__ import annotations

import re
from pathlib import Path

from docs.hooks.settings import Place, places
from streamrl.config.run_file import RunFile
from streamrl.config.sections.section import sections_in

ROOT = Path(__file__).parents[2]


def texts(*patterns: str) -> str:
    return "\n".join(p.read_text() for pattern in patterns for p in ROOT.glob(pattern))


def test_every_setting_is_given_somewhere():
    files = texts("deploy/**/*.yaml", "examples/**/*.yaml", "tests/**/*.py", "bench/*.py")
    given = set(re.findall(r"\b(\w+)[\"']?\s*[:=]", files))
    unused = list[str]()
    count = 0
    for place in places(Place("", RunFile)):
        for name, field in place.fields.items():
            if not sections_in(field.annotation):
                count += 1
                if name not in given:
                    unused.append(f"{place.path}.{name}")
    assert count > 150 and unused == []
