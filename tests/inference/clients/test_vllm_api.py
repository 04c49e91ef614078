"""Answers as vLLM writes them, with more in them than is read."""

from __future__ import annotations

import base64
import io
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.inference.clients.vllm_api import (
    GeneratedChoice,
    GenerateResponse,
    RenderResponse,
    experts_of,
)


def test_fields_that_nobody_reads_do_no_harm():
    assert msgspec.json.decode(
        b'{"token_ids": [1], "features": null}', type=RenderResponse
    ).token_ids == [1]
    answer = msgspec.json.decode(
        b"""{"request_id": "r", "prompt_logprobs": null, "choices": [{
            "index": 0, "finish_reason": "stop", "token_ids": [5, 2], "text": "5", "routed": null,
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            "logprobs": {"content": [
                {"token": "5", "logprob": 0, "bytes": [53], "top_logprobs": []},
                {"token": "", "logprob": -0.5, "bytes": null, "top_logprobs": []}
            ]}
        }]}""",
        type=GenerateResponse,
    )
    (choice,) = answer.choices
    assert [token.logprob for token in choice.logprobs.content] == [0.0, -0.5]
    assert (choice.weight_versions[0].version, choice.text) == ("3", "5")


def npy(experts: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, experts)
    return file.getvalue()


def said(experts: np.ndarray | bytes | None) -> GeneratedChoice:
    """An answer with these experts, as vLLM encodes them."""
    text = None
    if experts is not None:
        file = experts if isinstance(experts, bytes) else npy(experts)
        text = base64.b64encode(file).decode()
    return GeneratedChoice(
        [], logprobs=None, weight_versions=[], text="", finish_reason="stop", routed_experts=text
    )


@pytest.mark.parametrize(("largest", "dtype"), [(254, np.uint8), (255, np.uint16)])
def test_experts_are_counted_from_one_and_the_last_token_has_none(largest: int, dtype: type):
    """Three tokens, two layers, one expert each."""
    found = experts_of(said(np.array([[[0], [5]], [[largest], [2]]], np.uint8)), 3)
    assert found is not None and found.dtype == dtype
    assert found[..., 0].tolist() == [[1, 6], [largest + 1, 3], [0, 0]]
    assert experts_of(said(None), 3) is None


def test_experts_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"shape \[3, 2, 1\] for 3 tokens, expected \[2, layers"):
        experts_of(said(np.zeros((3, 2, 1), np.uint8)), 3)
    with pytest.raises(ValueError, match="routed experts of shape"):
        experts_of(said(np.zeros((2, 2, 1), np.float32)), 3)


def test_experts_are_the_same_in_whatever_order_their_array_is_written():
    experts = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    expected = experts_of(said(experts), 4)
    np.testing.assert_array_equal(experts_of(said(np.asfortranarray(experts)), 4), expected)


@pytest.mark.parametrize("wrong", [-2, 65_535, 2**40])
def test_numbers_that_are_no_experts_are_refused(wrong: int):
    with pytest.raises(ValueError, match="which are none"):
        experts_of(said(np.full((2, 2, 1), wrong)), 3)
    unknown = experts_of(said(np.full((2, 2, 1), -1)), 3)
    assert unknown is not None and not unknown.any()


@settings(max_examples=300)
@given(
    changes=st.dictionaries(st.integers(0, 151), st.integers(0, 255), max_size=6),
    length=st.integers(0, 152),
)
def test_bytes_that_are_no_array_are_refused_as_such(changes: dict[int, int], length: int):
    """The client takes a ValueError as an answer that cannot be used, and asks another server."""
    file = bytearray(npy(np.arange(12, dtype=np.uint16).reshape(3, 2, 2)))
    for place, value in changes.items():
        file[place] = value
    with suppress(ValueError):
        experts_of(said(bytes(file[:length])), 4)


def test_a_header_that_ends_too_early_is_no_array():
    file = npy(np.zeros((3, 2, 2), np.uint8)).replace(b"}", b" ")
    with pytest.raises(ValueError, match="no array"):
        experts_of(said(file), 4)
