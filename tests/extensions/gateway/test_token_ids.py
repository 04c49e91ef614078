from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.support.gateways import gateways
from tests.support.waiting import patience


def test_token_ids_go_on_from_token_ids(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["api_key"]

        def ask(tokens: list[int], **sampling: Any) -> httpx.Response:
            return httpx.post(
                f"{url}/inference/v1/generate",
                json={"token_ids": tokens, "sampling_params": sampling},
                headers={"authorization": f"Bearer {key}"},
                timeout=patience(30),
            )

        first = ask([5, 6], n=2, max_tokens=4).json()["choices"]
        assert [choice["index"] for choice in first] == [0, 1]
        assert first[1]["weight_versions"] == [{"version": "3", "start": 0, "end": 4}]
        said = first[0]["token_ids"]
        assert len(first[0]["logprobs"]["content"]) == len(said) == 4
        ask([5, 6, *said, 7]).raise_for_status()
        one, _, third = gateway.calls()
        for wrong in ([], [1, -1], [1, True], [1, 2**32], "text", None):
            refused = ask(wrong)  # pyright: ignore[reportArgumentType]
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "token_ids"
        assert ask([1], stop=["x"]).status_code == 400
    assert third.continues == one.call and third.prompt.tolist() == [7]
