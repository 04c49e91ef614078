"""A model call, a session or a reward that is invalid cannot be made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.stream.log.codec import DecodeError, decode, encode
from tests.support import sessions
from tests.support.build import floats


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"session": ""}, "session and call must not be empty"),
        ({"continues": "a"}, "call 'a' of session 's' continues itself"),
        ({"prompt": np.array([1.0])}, "prompt must be one-dimensional and unsigned, not float64"),
        ({"logprobs": floats(-1, -2)}, r"logprobs has shape \[2\], expected \[1\]"),
        ({"time_s": float("inf")}, "its time is not finite"),
        ({"tokens": np.zeros(0, np.uint16), "logprobs": floats()}, "nothing was sampled"),
    ],
)
def test_an_invalid_call_is_refused(fields: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        structs.replace(sessions.call("a", [1, 2], [3], session="s"), **fields)


def test_an_invalid_start_or_reward_is_refused():
    with pytest.raises(ValueError, match="session and problem_id must not be empty"):
        sessions.start("")
    with pytest.raises(ValueError, match="rollout and name must not be empty"):
        sessions.reward("", 1.0)
    with pytest.raises(ValueError, match="of 's' is not finite"):
        sessions.reward("s", float("nan"))


def test_the_name_of_a_session_is_not_the_largest_part_of_its_rollout():
    start = structs.replace(sessions.start("s"), group_id="g" * 1_001)
    with pytest.raises(DecodeError, match=r"`str` of length <= 1000 - at `\$\.group_id`"):
        decode("session-start/1", encode(start))
