"""Answers as vLLM writes them, with more in them than is read."""

from __future__ import annotations

import msgspec

from streamrl.inference.vllm_answers import Generated, Rendered


def test_fields_that_nobody_reads_do_no_harm():
    assert msgspec.json.decode(
        b'{"token_ids": [1], "features": null}', type=Rendered
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
        type=Generated,
    )
    (choice,) = answer.choices
    assert [token.logprob for token in choice.logprobs.content] == [0.0, -0.5]
    assert (choice.weight_versions[0].version, choice.text) == ("3", "5")
