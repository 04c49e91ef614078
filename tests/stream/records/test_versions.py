"""A policy version, a probe or a server that no part could work with cannot be made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamrl.stream.records import PolicyVersion, Probe, Server
from tests.support.build import floats

IDS = np.array([1, 2, 3], np.uint16)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "says"),
    [
        (IDS[:1], floats(), "two tokens or more, not 1"),
        (IDS.reshape(1, 3), floats(-1, -1), r"unsigned, not uint16\[1, 3\]"),
        (np.array(3, np.uint16), floats(-1), r"unsigned, not uint16\[\]"),
        (floats(1, np.nan), floats(-1), "tokens must be one-dimensional and unsigned"),
        (IDS, floats(-1), r"logprobs has shape \[1\], expected \[2\]"),
        (IDS, floats(-1, np.nan), "logprobs: value 1 is not finite"),
    ],
)
def test_a_probe_has_a_logprob_of_each_token_but_the_first(
    tokens: np.ndarray, logprobs: np.ndarray, says: str
):
    with pytest.raises(ValueError, match=says):
        Probe(tokens=tokens, logprobs=logprobs)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 2**63}, "policy version is 9223372036854775808, not 0 to 2147483647"),
        ({"version": -5}, "policy version is -5"),
        ({"lineage": -1}, "policy version 1: lineage is -1"),
        ({"time_s": float("nan")}, "policy version 1: its time is not finite"),
    ],
)
def test_the_number_of_a_version_fits_into_what_it_travels_in(fields: dict[str, Any], says: str):
    sound: dict[str, Any] = {"learner": "lead", "version": 1}
    with pytest.raises(ValueError, match=says):
        PolicyVersion(uri="", size_bytes=0, sha256="", **(sound | fields))


def test_a_server_serves_a_version_or_none():
    assert Server(server_id="a", url="").version == -1
    for version in (-2, 2**31):
        with pytest.raises(ValueError, match="server 'a': version"):
            Server(server_id="a", url="", version=version)
    with pytest.raises(ValueError, match="server 'a': its heartbeat is not finite"):
        Server(server_id="a", url="", heartbeat_s=float("inf"))
