from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.envs.loading import construct, load
from streamrl.system.errors import ConfigError


def mine(seed: int, digits: int = 1, **others: int) -> tuple[int, int, dict[str, int]]:
    return seed, digits, others


def strict(seed: int, digits: int = 1) -> int:
    assert digits > 0, "digits must be positive"
    return digits


def test_a_name_is_found_by_its_module_or_its_file_and_one_that_is_not_there_is_none():
    assert load(f"{__name__}:mine", "envs.x", "env") is mine
    assert load(f"{__file__}:mine", "envs.x", "env").__name__ == "mine"
    assert load(f"{__name__}:gone", "envs.x", "env") is None


def test_a_file_that_fails_is_named_with_what_it_said(tmp_path: Path):
    file = tmp_path / "mine.py"
    for text, says in (
        ("words = undefined", "NameError: name 'undefined'"),
        ("def f(:", "SyntaxError"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^envs.x: env .*mine.py fails with {says}"):
            load(f"{file}:Mine", "envs.x", "env")


def test_parameters_are_those_of_the_run_file_and_what_is_given():
    assert construct(mine, "mine", {"digits": 3, "more": 4}, "envs.x", seed=7) == (
        7,
        3,
        {"more": 4},
    )


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"digit": 3}, "envs.x.params: strict takes no 'digit'; did you mean 'digits'?"),
        ({"zzz": 3}, "envs.x.params: strict takes no 'zzz'; it takes digits"),
        ({"seed": 3}, "strict takes no 'seed'"),
        ({"digits": 0}, "strict refuses them: AssertionError: digits must be positive"),
    ],
)
def test_a_parameter_that_is_not_taken_is_named(params: dict[str, int], says: str):
    with pytest.raises(ConfigError) as refused:
        construct(strict, "strict", params, "envs.x", seed=7)
    assert says in str(refused.value)
