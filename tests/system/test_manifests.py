import pytest
import yaml

from streamrl.system.manifests import to_yaml


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1e3",
            "1E5",
            "12e03",
            "1.5e3",
            "0o7",
            "0x1F",
            "-0x1",
            "0b1",
            "1_000",
            "1:30",
            ".5",
            "+1",
        ),
        *("on", "Off", "yes", "y", "N", "true", "null", "~", "inf", ".inf", "NaN", "2026-01-31"),
    ],
)
def test_a_string_that_some_reader_takes_for_something_else_is_quoted(text: str):
    assert to_yaml([{text: text}]) == f"---\n'{text}': '{text}'\n"


@pytest.mark.parametrize("text", ["copy-digits", "10Gi", "65536Mi", "e3", "demo.env-1e3", "none"])
def test_any_other_is_not(text: str):
    assert to_yaml([{"name": text}]) == f"---\nname: {text}\n"


def test_what_is_there_twice_is_written_twice():
    labels = {"app": "x"}
    written = to_yaml([{"labels": labels, "selector": labels}, {"labels": labels}])
    assert "&" not in written
    assert list(yaml.safe_load_all(written)) == [
        {"labels": labels, "selector": labels},
        {"labels": labels},
    ]
