from __future__ import annotations

from streamrl.system.text import (
    did_you_mean,
    escaped,
    nearest,
    nearest_or_all,
    one_line,
    printable,
    unknown_name,
)


def test_a_wrong_name_is_answered_with_the_nearest_one_or_with_all():
    assert nearest("grp", ["ppo", "grpo"]) == "grpo"
    assert nearest("g", ["ppo", "grpo"]) == ""
    assert nearest("gr", ["ppo", "grpo"], 0.9) == ""
    assert did_you_mean("digit", ["digits"]) == "did you mean 'digits'?"
    assert did_you_mean("zzz", ["digits"]) == ""
    assert nearest_or_all("grp", ("grpo",)) == "did you mean 'grpo'?"
    assert nearest_or_all("x", ("demand", "capacity")) == "there are demand, capacity"
    assert unknown_name("grp", ["", "grpo"]) == "'grp' is not known; did you mean 'grpo'?"
    assert unknown_name("x", ["", "ppo", "grpo"]) == (
        "'x' is not known; shipped: ppo, grpo; your own: MODULE:NAME"
    )


def test_any_text_fits_on_one_line():
    assert one_line(ValueError("no\n  such\tthing"), limit=7) == "no such"


def test_a_terminal_survives_any_text():
    assert escaped("\x1b[31mred\n\té") == "\\x1b[31mred\n\té"
    assert printable("\x1b[31mred\nnext é") == "\\x1b[31mred\\nnext é"
    assert printable("x" * 10_000) == "x" * 300 + "..."
