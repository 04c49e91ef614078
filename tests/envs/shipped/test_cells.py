"""Values of columns, as other programs write them: taken as what they are, or refused."""

from __future__ import annotations

import datetime
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest

from streamrl.envs.shipped.cells import answer_in_cell, prompt_messages, published, text_in

ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("72", "72"),
        (72, "72"),
        (72.0, "72"),
        (0.5, "0.5"),
        (-0.0, "0"),
        (1e22, "1e+22"),
        (10**30, "1" + "0" * 30),
        (np.int64(72), "72"),
        (np.float32(0.5), "0.5"),
        (np.float32(0.1), "0.1"),
        (np.float16(0.1), "0.1"),
        (np.str_("72"), "72"),
        (Decimal("1.50"), "1.50"),
        (Decimal("1E+2"), "100"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (ID, "12345678-1234-5678-1234-567812345678"),
    ],
)
def test_an_answer_is_a_text_or_a_number(cell: Any, text: str):
    assert answer_in_cell(cell, "a") == text


@pytest.mark.parametrize(
    "cell",
    [
        None,
        "",
        " ",
        float("nan"),
        float("inf"),
        True,
        b"72",
        ["72"],
        {"text": "72"},
        np.array(["72"]),
        np.float64("nan"),
        np.bool_(True),
        pd.NA,
        pd.NaT,
        Decimal("NaN"),
        "\ud800",
    ],
)
def test_what_is_no_answer_is_refused_with_its_column(cell: Any):
    with pytest.raises(ValueError, match="^'a' (is|has) "):
        answer_in_cell(cell, "a")


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (1.0, 1.0),
        ("x", "x"),
        (2**63 - 1, 2**63 - 1),
        (2**63, "9223372036854775808"),
        (-(2**70), "-1180591620717411303424"),
        (ID, str(ID)),
        (np.int32(7), 7),
        (np.bool_(True), True),
        (pd.NA, None),
        (pd.Timestamp("2026-01-02"), "2026-01-02T00:00:00"),
        (Decimal("0.10"), "0.10"),
    ],
)
def test_an_id_of_any_type_is_published(cell: Any, value: Any):
    kept = published(cell, "id")
    assert kept == value and type(kept) is type(value)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (float("nan"), "'id' is nan"),
        (b"x", "'id' is bytes; only texts and numbers can be kept"),
        ([1], "'id' is list"),
        (np.array([1]), "'id' is list"),
        ({"a": 1}, "'id' is dict"),
        ("\udfff", "'id' has half of a surrogate pair"),
    ],
)
def test_what_no_record_can_have_is_refused(cell: Any, says: str):
    with pytest.raises(ValueError, match=says):
        published(cell, "id")


USER = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize(
    ("cell", "messages"),
    [
        ("2+2?", [USER]),
        ([USER], [USER]),
        (np.array([USER]), [USER]),
        ([{**USER, "name": None, "tool_calls": None}], [USER]),
        (
            [{**USER, "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}],
            [USER],
        ),
        ([{**USER, "content": [{"type": "text", "text": "2+2?", "image": None}]}], [USER]),
        ([{**USER, "content": ["2+2?"]}], [USER]),
        (
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": "4"},
            ],
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": []},
                {"role": "tool", "content": "4"},
            ],
        ),
    ],
)
def test_a_prompt_is_a_text_or_messages(cell: Any, messages: list[dict[str, Any]]):
    assert prompt_messages(cell, "prompt") == messages


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("", "'prompt' is neither a text nor a list of messages"),
        (7, "'prompt' is neither a text nor a list of messages"),
        ([], "'prompt' is neither a text nor a list of messages"),
        (USER, "'prompt' is neither a text nor a list of messages"),
        ('[{"role": "user", "content": "?"}]', "'prompt' is a text that spells messages"),
        ("[{'content': '?', 'role': 'user'}]", "'prompt' is a text that spells messages"),
        ([[USER]], "'prompt' has a message without role and content"),
        ([{"from": "human", "value": "?"}], "write them as 'role' and 'content'"),
        ([{**USER, "role": "human"}], "'human' is no role; there are system"),
        ([{**USER, "content": None}], "'prompt' has a message without role and content"),
        ([{**USER, "content": " "}], "'prompt' has an empty message of the user"),
        ([{**USER, "content": 7}], "'prompt' has a message whose content is no text: 7"),
        ([{**USER, "content": {"text": "?"}}], "'prompt' has a message whose content is no text"),
        (
            [{**USER, "content": [IMAGE]}],
            "'prompt' has a part that is no text: .'type': 'image_url'",
        ),
        ([{**USER, "content": [{"text": "?", **IMAGE}]}], "'prompt' has a part that is no text"),
        ([{**USER, "content": "\ud800"}], "'prompt' has half of a surrogate pair"),
        ([{**USER, "x": "\ud800"}], "'prompt' has a message that cannot be sent to a server"),
        (
            [USER, {"role": "assistant", "content": "4"}],
            "'prompt' ends with a message of the assist",
        ),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_column(cell: Any, says: str):
    with pytest.raises(ValueError, match=says):
        prompt_messages(cell, "prompt")


def test_a_text_is_never_made_of_something_else():
    assert text_in("f", "prompt") == "f"
    for cell in (None, 7, ["f"], {"a": "f"}, b"f", " "):
        with pytest.raises(ValueError, match="^'prompt' is "):
            text_in(cell, "prompt")
