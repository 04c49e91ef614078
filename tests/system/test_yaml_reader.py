"""YAML is read as PyYAML reads it, and a key that a map has twice is refused."""

import pytest
import yaml

from streamrl.system.yaml_reader import from_yaml


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "a: 1\nb: [1, 1.5, 1e3, true, null, 2026-11-28, '1']",
        "base: &base {a: 1, b: 2}\nmerged: {<<: *base, a: 3}\nsame: *base",
        "x: {deep: {base: &base {a: 1}, more: &more {<<: *base, a: 2}}}\nc: {<<: *more, a: 3}",
        "1: a\n'1': b",
        "- {a: 1}\n- {a: 2}",
    ],
)
def test_a_document_is_read_as_by_pyyaml(text: str) -> None:
    assert from_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1"),
        ("{a: 1, a: 1}", "line 1, column 8"),
        ("envs:\n  sum: {}\n  sum: {}", "line 3, column 3"),
        ("- x:\n    a: 1\n    a: 2", "line 3, column 5"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_with_both_lines(text: str, line: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"the key '(a|sum)' is in line \d already") as raised:
        from_yaml(text)
    assert line in str(raised.value)


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "%x", "!!python/object:os.system {}", "a\0"])
def test_what_is_no_yaml_or_names_a_type_of_python_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        from_yaml(text)


@pytest.mark.parametrize("text", ["a: 2026-13-45", "a: !!int x", "!!timestamp x", "\udcff"])
def test_a_value_that_cannot_be_read_is_no_other_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="a value cannot be read"):
        from_yaml(text)
