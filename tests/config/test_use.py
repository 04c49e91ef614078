"""Every setting is used: a run file, an example, a measurement or a test of its effect sets it to
something else than its default. What none of them sets is a constant.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml

from streamrl.config import presets
from streamrl.config.run_file import RunFile
from streamrl.config.sections.section import Section, sections_in

ROOT = Path(__file__).parents[2]
# Files that set every setting because it is one, and show nothing of its effect.
LISTS = (
    "config",
    "run/orchestrator/test_resuming.py",
    "extensions/recordings/test_foreign_settings.py",
)
OVERRIDE = re.compile(r"([a-z_]+(?:\.[\w*-]+)*)=(.*)", re.DOTALL)
UNKNOWN = object()  # a value that only the program knows


class Setting(NamedTuple):
    """A setting, by the section that declares it."""

    section: type[Section]
    name: str

    def __str__(self) -> str:
        return f"{self.section.__name__}.{self.name}"


def sections(section: type[Section]) -> Iterator[type[Section]]:
    """This section and all that are inside it."""
    yield section
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation).values():
            yield from sections(inner)


def declared(section: type[Section], name: str) -> Setting:
    """The setting that a section has, or that it has of its base."""
    base = section.__base__
    if base is not None and issubclass(base, Section) and name in base.model_fields:
        return declared(base, name)
    return Setting(section, name)


SECTIONS = {section.__name__: section for section in sections(RunFile)}
SETTINGS = dict.fromkeys(
    declared(section, name)
    for section in SECTIONS.values()
    for name, field in section.model_fields.items()
    if not sections_in(field.annotation)
)


NAMES = [
    *dict.fromkeys(
        declared(section, name) for section in SECTIONS.values() for name in section.model_fields
    )
]


def unique_names() -> dict[str, type[Section]]:
    """Names by which a helper of tests hands on one setting: those of a section, and those of
    several words that one section alone has.
    """
    found: dict[str, type[Section]] = {}
    for name in {setting.name for setting in NAMES}:
        owners = [setting.section for setting in NAMES if setting.name == name]
        inner = [sections_in(owner.model_fields[name].annotation) for owner in owners]
        is_word_of_one = len(owners) == 1 and "_" in name
        if is_word_of_one or (inner[0] and all(each == inner[0] for each in inner)):
            found[name] = owners[0]
    return found


UNIQUE = unique_names()


def settings_in(section: type[Section], values: object) -> Iterator[Setting]:
    """The settings that these values of a section set to something else than their default."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        field = section.model_fields.get(name)
        if field is None:
            continue
        inner = sections_in(field.annotation)
        if not inner:
            if value is UNKNOWN or value != field.get_default(call_default_factory=True):
                yield declared(section, name)
            continue
        within = [value]
        if get_origin(field.annotation) is dict and isinstance(value, Mapping):
            within = [*value.values()]
        elif get_origin(field.annotation) is list and isinstance(value, list):
            within = value
        for each in within:
            for one in dict.fromkeys(inner.values()):
                yield from settings_in(one, each)


def literal(node: ast.expr) -> Any:
    """The value of an expression, with UNKNOWN for what is computed."""
    if isinstance(node, ast.Dict):
        known = {
            key.value: literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
        names = [key for key in node.keys if key is not None and not isinstance(key, ast.Constant)]
        for number, key in enumerate(names):
            known[f"name-{number}"] = literal(node.values[node.keys.index(key)])
        return known
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(element) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def override(text: str, value: Any) -> dict[str, Any]:
    """The run file's settings that `section.key=value` sets."""
    *parents, last = text.split(".")
    made: dict[str, Any] = {last: value}
    for parent in reversed(parents):
        made = {parent: made}
    return made


def settings_of_program(path: Path) -> Iterator[Setting]:
    """The settings that a program sets: in the settings of a run, as overrides, or in a section."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            values = literal(node)
            yield from settings_in(RunFile, {n: v for n, v in values.items() if v is not UNKNOWN})
            yield from uniquely_named(values)
        elif isinstance(node, ast.Call):
            given = {word.arg: literal(word.value) for word in node.keywords if word.arg}
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in SECTIONS:
                yield from settings_in(SECTIONS[name], given)
            else:
                nested = {name: value for name, value in given.items() if isinstance(value, dict)}
                yield from settings_in(RunFile, nested)
                yield from uniquely_named(given)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if found := OVERRIDE.fullmatch(node.value):
                yield from settings_in(RunFile, override(found[1], _yaml(found[2])))
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            found = OVERRIDE.fullmatch(str(node.values[0].value))
            yield from settings_in(RunFile, override(found[1], UNKNOWN)) if found else ()


def uniquely_named(values: Mapping[str, Any]) -> Iterator[Setting]:
    for name, value in values.items():
        if name in UNIQUE:
            yield from settings_in(UNIQUE[name], {name: value})


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return UNKNOWN


def settings_in_use() -> Iterator[Setting]:
    for path in ROOT.glob("deploy/**/*.yaml"):
        text = path.read_text().replace("{name}", "name")
        for document in yaml.safe_load_all(text) if re.search("^run: ", text, re.M) else ():
            yield from settings_in(RunFile, presets.resolve(document))
    for folder in ("examples", "bench", "tests"):
        for path in (ROOT / folder).glob("**/*.py"):
            if not str(path.relative_to(ROOT / folder)).startswith(LISTS):
                yield from settings_of_program(path)


def test_every_setting_is_set_by_a_run_file_an_example_or_a_test_of_its_effect():
    unused = SETTINGS.keys() - {*settings_in_use()}
    assert sorted(map(str, unused)) == [], "use them, or make constants of them"
